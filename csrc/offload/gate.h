#pragma once

#include <atomic>
#include <cstdint>

#include "device/device.h"
#include "offload/reason.h"
#include "offload/transfer.h"

namespace kvswap {

// Allocates words of pinned memory for gates, many at a time. They are never freed and never
// reused: a graph may be replayed long after its gate and its handler are gone. The scheduler's
// lock guards it; the context of the device is current.
class GateWords {
 public:
  // `count` words of `memory`, each 1.
  volatile uint64_t* take(StreamWords& memory, int count);

 private:
  volatile uint64_t* next_ = nullptr;
  int left_ = 0;
};

// Lets a stream wait for the groups of layers of a load, also in a captured CUDA graph, which then
// waits on each replay.
//
// The gate has a word of pinned memory for each group of layers, 1 while it is open. A load closes
// the gate in the order of the stream on which the graph will be replayed, so earlier replays still
// pass. The gate's own stream opens the words again, each after its group of layers was loaded and
// after the closing. A second load closes the gate only after the first one's opening, so no wait
// passes an unfinished load.
//
// The scheduler's lock guards it, except open_after(), wait() and release().
class Gate {
 public:
  // Throws if the device's streams cannot wait for a word.
  Gate(Device& device, int layer_groups, GateWords& words);
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  Device& device;
  const int layer_groups;

  // A gate has two references: its handler's, which watches it while it is busy, and its caller's.
  // The last one frees its stream and its events. Any thread may call.
  static void release(Gate* gate);
  // Whether only the handler still has it.
  bool is_dropped() const { return references_ == 1; }

  // A load has closed the gate, and the driver does not have its opening yet. No other load may
  // close it meanwhile.
  bool is_busy() const { return busy_; }
  // Why the driver has refused open(), to be tried again; or an empty reason.
  const Reason& problem() const { return problem_; }

  // Closes the gate for a load, on this stream of its device. If it throws, the gate is as it was,
  // or there is a problem().
  void close(Stream current);
  // Opens the gate for each group of layers when the transfer has copied it. Returns why it could
  // not, or an empty reason. The gate stays busy until opened().
  Reason open_after(const Transfer& transfer) noexcept;
  void opened() noexcept;
  // Opens the gate after its closing, without a load. False if the driver refused.
  bool open() noexcept;
  // Sets the words from the host: the device is lost, and no stream will open the gate.
  void let_through() noexcept;
  // Makes a stream, of any device, wait until the gate is open for a group of layers.
  void wait(int layer_group, const StreamRef& stream) const;

 private:
  ~Gate();
  void destroy();
  void set(int layer_group, uint64_t value, Stream stream) const;
  void reopen(Stream current) noexcept;
  // Opens after the closing and, if there is a transfer, after each of its groups of layers.
  void enqueue_opening(const Transfer* transfer);

  StreamWords* memory_ = nullptr;
  volatile uint64_t* words_ = nullptr;
  Stream opener_ = nullptr;
  Event closed_ = nullptr, opened_ = nullptr;
  std::atomic<int> references_{2};
  bool used_ = false;  // whether `opened_` was ever recorded
  bool busy_ = false;
  Reason problem_;
};

}  // namespace kvswap
