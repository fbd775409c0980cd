#pragma once

#include <memory>
#include <vector>

#include "device/device.h"
#include "environment.h"
#include "event_pool.h"
#include "offload/group.h"
#include "offload/job.h"
#include "offload/stream_point.h"
#include "offload/transfer.h"

namespace kvswap {

// Transfers in flight, and entries of the driver's queue. More gain nothing. A stream that is held
// up has room for 1,020 entries, and a copy with its events takes three of them; then the driver
// blocks the thread that submits (H200).
constexpr size_t kMaxRunning = 64, kMaxEntries = 700;

// One direction of transfers: the copies that run one after another on a stream, and the events
// that they need. The scheduler's lock guards it. Only submit(), submit_remainder() and
// synchronize() run without the lock, called by the one thread that owns the channel at that time.
class Channel {
 public:
  // The context of the device is current, as in all calls that ask the device for something.
  Channel(int number, Device& device);
  ~Channel() { close(); }

  int number() const { return number_; }

  // Whether no transfer is in flight.
  bool is_idle() const { return running_.empty(); }
  size_t num_running() const { return running_.size(); }
  size_t num_running_jobs() const;
  // The transfer in flight that was submitted first. There is one.
  Transfer& oldest() const { return *running_.front(); }

  // The newest running transfer with a job up to this number; null when there is none.
  std::shared_ptr<Transfer> newest_until(int64_t id) const;

  // Whether this many entries more of the driver's queue may be in flight.
  bool has_room_for(size_t entries) const;

  // A point that a job starts after: all that the stream, or the event, stands for now. Null when
  // that has ended. Events are waited for in the order of these calls.
  StreamPoint* point_of_stream(Stream stream) { return points_.take(stream); }
  StreamPoint* point_of_event(Event event);
  void give_point(StreamPoint* point) noexcept { points_.give(point); }
  bool is_over(const StreamPoint& point) const { return points_.is_over(point); }

  // Of the copies; null where the device has no streams.
  Stream stream() const { return stream_; }

  // From now on transfers can be staged, in this memory.
  void use_staging(PackKernels& kernels, uint64_t begin, uint64_t bytes) {
    kernels.use_staging(*copier_, begin, bytes);
  }

  // A transfer without jobs, with its events. Throws, and takes nothing, when one cannot be made.
  Transfers make_transfer(int layer_groups);

  // The transfer is in flight now.
  void run(Transfers transfer) noexcept;
  // The oldest transfer has ended.
  void retire_first() noexcept;
  // Gives the events of a transfer back as soon as no other thread holds it.
  void retire(Transfers transfer) noexcept;

  // Copies the transfer up to its remainder, after the events. Returns why it could not, or an
  // empty reason; sets `copying` as soon as bytes may move. Without the lock.
  Reason submit(Transfer& transfer, const std::vector<Event>& wait_events,
                const std::vector<Group>& groups, int64_t layers, bool& copying) noexcept;
  // Copies the remainder, and records the ends. Without the lock.
  Reason submit_remainder(Transfer& transfer, const std::vector<Group>& groups,
                          int64_t layers) noexcept;

  // Whether the transfer has ended on the device. Throws when the device is lost.
  bool has_ended(Transfer& transfer) const;
  double copy_seconds(const Transfer& transfer) const;

  // Waits until all that was submitted has run. False when the device is lost. Without the lock.
  bool synchronize() { return copier_->synchronize(); }
  // Whether the device still answers.
  bool is_alive() const { return device_.is_alive(stream_); }

  size_t streams() const { return stream_ == nullptr ? 0 : 2 + copier_->streams(); }
  size_t events() const {
    return points_.created() + events_.created() + (copier_ == nullptr ? 0 : copier_->events());
  }
  // Frees streams and events. Nothing runs any more, or the device is lost.
  void close();

 private:
  void copy(Transfer& transfer, PartRange parts, const std::vector<Group>& groups, int64_t layers);
  // Sets part_copies_ to some parts of the transfer, in one group of layers.
  void list_copies(const Transfer& transfer, PartRange parts, int layer_group,
                   const std::vector<Group>& groups, int64_t layers);
  void check_addresses() const;
  void give_events(Transfer& transfer) noexcept;

  const int number_;
  Device& device_;
  const Environment environment_;
  Stream stream_ = nullptr;   // of the copies
  Stream waiting_ = nullptr;  // waits for the callers' events, in the order of submission
  std::unique_ptr<Copier> copier_;
  std::vector<PartCopy> part_copies_;  // for the copier; kept for its memory
  EventPool events_;                   // with a time
  StreamPoints points_;
  Transfers running_;   // in the order of submission
  size_t entries_ = 0;  // in flight
  Transfers retired_;   // that another thread holds, and is about to wait for
};

}  // namespace kvswap
