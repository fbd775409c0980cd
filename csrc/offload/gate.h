#pragma once

#include <cstdint>

#include "../cuda_driver.h"
#include "reason.h"
#include "transfer.h"

namespace kvswap {

// Parts that a stream can wait for, also in a captured CUDA graph, which waits again on each
// replay.
//
// A part is a word of pinned memory, 1 while it is open. A load closes the gate in the order of the
// stream on which the graph will be replayed, so that earlier replays still pass; the words are set
// again on a stream of the gate's own, behind the load and behind the closing. Two loads in a row:
// the second closes behind the first one's opening, so that no wait passes an unfinished load.
//
// The caller has the handler's lock, but for open_behind() and wait(). Never destroyed: a graph may
// be replayed when nobody knows the gate any more.
class Gate {
 public:
  // Throws where the driver cannot wait for a value.
  Gate(int device, int parts);

  const int device, parts;

  // A load has closed it, and its opening is not with the driver yet. No other load may close it.
  bool is_busy() const { return busy_; }
  // Why the driver has not taken the opening without a load, or none. Then to be tried again.
  const Reason& problem() const { return problem_; }

  // For a load. If it throws, the gate is as it was, or there is a problem().
  void close(cuda::Stream current);
  // Opens each part when a group of layers has landed. Returns why it could not, or none; nobody
  // else may close the gate before opened().
  Reason open_behind(const Transfer& transfer) noexcept;
  void opened() noexcept;
  // Opens all parts behind the closing, without a load. False when the driver did not take it.
  bool open() noexcept;
  // Lets go whoever still looks at the words of a device that runs nothing any more.
  void let_through() noexcept;
  void wait(int part, cuda::Stream stream) const;

 private:
  void set(int part, uint64_t value, cuda::Stream stream) const;
  void open_again(cuda::Stream current) noexcept;
  // Behind the closing, and behind each group of layers of a transfer, if there is one.
  void enqueue_opening(const Transfer* transfer);

  volatile uint64_t* words_ = nullptr;
  cuda::Stream opener_ = nullptr;
  cuda::Event closed_ = nullptr, opened_ = nullptr;
  bool used_ = false;  // whether `opened_` was ever recorded
  bool busy_ = false;
  Reason problem_;
};

}  // namespace kvswap
