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
  // `count` words, set to 1: open.
  volatile uint64_t* take(StreamWords& memory, int count);

 private:
  volatile uint64_t* next_ = nullptr;
  int left_ = 0;
};

// Streams wait at a gate for each layer group of a load. The wait can be captured in a graph, which
// then waits on each replay.
//
// The gate has a word of pinned memory for each layer group: 1 is open, 0 closed. A load closes the
// gate by writes in the stream on which the graph will be replayed, so earlier replays still pass.
// The gate's own stream then opens each word, after the closing and after that layer group was
// loaded. A second load closes the gate only after the first one has opened it, so no wait passes
// an unfinished load.
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

  // Drops one of the two references: the caller's, or the handler's, which it keeps until the
  // opening is enqueued. The last release frees the stream and the events. Any thread may call.
  static void release(Gate* gate);
  // Whether only the handler still has it.
  bool is_dropped() const { return references_ == 1; }

  // Whether the gate was closed and its opening is not enqueued yet. No other load may close it
  // meanwhile.
  bool awaits_opening() const { return awaits_opening_; }
  // Why the driver refused to open the gate, or an empty reason. If not empty, open() must be tried
  // again.
  const Reason& opening_error() const { return opening_error_; }

  // Enqueues the closing for a load, on this stream of the gate's device. If it throws, the gate is
  // as it was, or there is an opening_error().
  void close(Stream current);
  // Enqueues the opening of each layer group, after the transfer has copied it. Returns why it
  // could not, or an empty reason. The gate awaits its opening until on_opening_enqueued().
  Reason open_after(const Transfer& transfer) noexcept;
  // The opening is enqueued: no longer awaits it.
  void on_opening_enqueued() noexcept;
  // Enqueues the opening right after the closing: the load will copy nothing. False if the driver
  // refused.
  bool open() noexcept;
  // Opens the gate from the host: the device is lost, and no stream will do it.
  void open_from_host() noexcept;
  // Makes a stream, of any device, wait until the gate is open for a layer group.
  void wait(int layer_group, const StreamRef& stream) const;

 private:
  ~Gate();
  void destroy();
  void set(int layer_group, uint64_t value, Stream stream) const;
  void reopen(Stream current) noexcept;
  // Enqueues the opening: after the closing and, if there is a transfer, each word after its end.
  void enqueue_opening(const Transfer* transfer);

  StreamWords* memory_ = nullptr;
  volatile uint64_t* words_ = nullptr;
  Stream opener_ = nullptr;
  // Recorded after the words were written.
  Event closing_event_ = nullptr, opening_event_ = nullptr;
  std::atomic<int> references_{2};
  bool was_opened_ = false;  // whether `opening_event_` was ever recorded
  bool awaits_opening_ = false;
  Reason opening_error_;
};

}  // namespace kvswap
