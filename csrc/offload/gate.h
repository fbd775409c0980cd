#pragma once

#include <atomic>
#include <cstdint>

#include "cuda/context.h"
#include "offload/reason.h"
#include "offload/transfer.h"

namespace kvswap {

// Words of pinned memory for gates, many in one allocation. They are never freed and never used
// again: a graph may be replayed when its gate and its handler are long gone. The handler's lock
// guards it; the context of the device is current.
class GateWords {
 public:
  // So many words, each 1.
  volatile uint64_t* take(int count);

 private:
  volatile uint64_t* next_ = nullptr;
  int left_ = 0;
};

// Parts that a stream can wait for, also in a captured CUDA graph, which waits again on each
// replay.
//
// A part is a word of pinned memory, 1 while it is open. A load closes the gate in the order of the
// stream on which the graph will be replayed, so that earlier replays still pass; the words are set
// again on a stream of the gate's own, behind the load and behind the closing. Two loads in a row:
// the second closes behind the first one's opening, so that no wait passes an unfinished load.
//
// The caller has the handler's lock, but for open_behind(), wait() and release().
class Gate {
 public:
  // Throws where the driver cannot wait for a value.
  Gate(int device, int parts, GateWords& words);
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  const int device, parts;

  // It has two references: of its handler, which looks at it while it is busy, and of the caller,
  // whose loads close it. With the last one its stream and its events go. Any thread may call.
  static void release(Gate* gate);
  // Only the handler has it.
  bool is_dropped() const { return references_ == 1; }

  // A load has closed it, and its opening is not with the driver yet. No other load may close it.
  bool is_busy() const { return busy_; }
  // Why the driver has not taken the opening without a load, or none. Then to be tried again.
  const Reason& problem() const { return problem_; }

  // For a load. If it throws, the gate is as it was, or there is a problem().
  void close(const cuda::StreamRef& current);
  // Opens each part when a group of layers has landed. Returns why it could not, or none; nobody
  // else may close the gate before opened().
  Reason open_behind(const Transfer& transfer) noexcept;
  void opened() noexcept;
  // Opens all parts behind the closing, without a load. False when the driver did not take it.
  bool open() noexcept;
  // Lets go whoever still looks at the words of a device that runs nothing any more.
  void let_through() noexcept;
  // A stream of any device.
  void wait(int part, const cuda::StreamRef& stream) const;

 private:
  ~Gate();
  void destroy();
  void set(int part, uint64_t value, cuda::Stream stream) const;
  void open_again(cuda::Stream current) noexcept;
  // Behind the closing, and behind each group of layers of a transfer, if there is one.
  void enqueue_opening(const Transfer* transfer);

  volatile uint64_t* words_ = nullptr;
  cuda::Stream opener_ = nullptr;
  cuda::Event closed_ = nullptr, opened_ = nullptr;
  std::atomic<int> references_{2};
  bool used_ = false;  // whether `opened_` was ever recorded
  bool busy_ = false;
  Reason problem_;
};

}  // namespace kvswap
