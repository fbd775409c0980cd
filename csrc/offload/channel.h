#pragma once

#include <memory>
#include <vector>

#include "device/device.h"
#include "event_pool.h"
#include "offload/group.h"
#include "offload/job.h"
#include "offload/stream_point.h"
#include "offload/transfer.h"

namespace kvswap {

// Limits of a channel: its transfers in flight, and the entries that they take in the driver's
// queue. A waiting stream has room for 1,020 entries, and a copy with its events takes three. When
// the queue is full, the driver blocks the submitting thread (H200). Higher limits gain nothing.
constexpr size_t kMaxRunning = 64, kMaxEntries = 700;

// One direction of transfers: the copies that run one after another on a stream, and the events
// that they need. The scheduler's lock guards it. Only enqueue() and synchronize() run without the
// lock, called by the one thread that owns the channel at that time.
class Channel {
 public:
  // The context of the device is current, here and in all calls below that use the device.
  Channel(int number, Device& device);
  ~Channel() { close(); }

  int number() const { return number_; }

  // Whether no transfer is in flight.
  bool is_idle() const { return running_.empty(); }
  size_t num_running() const { return running_.size(); }
  size_t num_running_jobs() const;
  // The transfer in flight that was submitted first. Call it only if the channel is not idle.
  Transfer& oldest() const { return *running_.front(); }

  // The newest transfer in flight that has a job with this number or a lower one; null for none.
  std::shared_ptr<Transfer> newest_until(int64_t id) const;

  size_t fragments_per_entry() const { return copier_->fragments_per_entry(); }
  // Whether a transfer that takes this many entries may be submitted now.
  bool has_room_for(size_t entries) const;
  // Whether the ring has room for the states of `blocks` more blocks. If not, their job waits.
  bool has_states_for(size_t blocks) const { return states_.has_room(blocks); }

  // Records what a job starts after, all of `after`. Returns null if that has ended. The channel
  // waits for callers' events, and for several streams, on one stream, in the order of these calls.
  StreamPoint* record_point(const std::vector<After>& after);
  // See StreamPoints.
  void release_point(StreamPoint* point) noexcept { points_.release(point); }
  bool has_happened(const StreamPoint& point) const { return points_.has_happened(point); }

  // The stream that the channel copies on; null if the device has no streams.
  Stream stream() const { return stream_; }

  // See Copier.
  void use_staging(uint64_t begin, uint64_t bytes) { copier_->use_staging(begin, bytes); }
  void add_relay(int device, uint64_t begin, uint64_t bytes) {
    copier_->add_relay(device, begin, bytes);
  }
  void remove_relay(int device) noexcept { copier_->remove_relay(device); }
  void use_exchange(std::shared_ptr<Exchange> exchange, uint64_t place_bytes) {
    copier_->use_exchange(exchange, place_bytes);
    exchange_ = std::move(exchange);
  }

  // From now on blocks that can be rejected can be copied, with these SlotStates::kCount zeros.
  void use_states(uint8_t* states) { states_.use(states); }

  // A transfer of these parts without jobs, with its events. Throws, and takes nothing, when one
  // cannot be made. There are states for its blocks.
  Transfers make_transfer(int layer_groups, std::vector<TransferPart> parts,
                          const std::vector<Group>& groups);

  // Notes that the transfer is in flight.
  void add_running(Transfers transfer) noexcept;
  // Notes that the oldest transfer has ended.
  void retire_first() noexcept;
  // Returns the resources of the oldest transfer, which has ended, or of the newest, which has
  // failed. Its events are returned only when no other thread holds the transfer.
  void retire(Transfers transfer) noexcept;

  // Submits the copies of the transfer's next layer group, and records its end; before the first
  // one the stream waits for the events, and the transfer's start is recorded. Returns why it could
  // not, or an empty reason. It may stop when it has staged `bytes` bytes. Until
  // Transfer::is_enqueued() the next call goes on, and no other transfer may be enqueued. Without
  // the lock.
  Reason enqueue(Transfer& transfer, const std::vector<Event>& wait_events,
                 const std::vector<Group>& groups, int64_t layers, uint64_t bytes) noexcept;

  // Whether the transfer has ended on the device. Throws when the device or a relay is lost.
  bool has_ended(Transfer& transfer) const;
  double copy_seconds(const Transfer& transfer) const;

  // Waits until all that was submitted has run. False when the device is lost. Without the lock.
  bool synchronize() { return copier_->synchronize(); }
  // Whether the device and its relays still answer.
  bool is_alive() const { return device_.is_alive(stream_) && copier_->relays_are_alive(); }

  size_t num_streams() const { return stream_ == nullptr ? 0 : 2 + copier_->num_streams(); }
  size_t num_events() const {
    return points_.num_created() + events_.num_created() +
           (copier_ == nullptr ? 0 : copier_->num_events());
  }
  // See Copier.
  bool is_drained() const { return copier_->is_drained(); }

  std::vector<RelayedBytes> relayed_bytes() const {
    return copier_ == nullptr ? relayed_bytes_ : copier_->relayed_bytes();
  }
  // Frees streams and events. Nothing runs any more, or the device is lost.
  void close();

 private:
  void copy(Transfer& transfer, const std::vector<Group>& groups, int64_t layers, uint64_t bytes);
  // Sets part_copies_ to the parts of the transfer, for one layer group.
  void list_copies(Transfer& transfer, int layer_group, const std::vector<Group>& groups,
                   int64_t layers);
  void take_states(Transfer& transfer, const std::vector<Group>& groups);
  void give_events(Transfer& transfer) noexcept;

  const int number_;
  Device& device_;
  Stream stream_ = nullptr;        // the channel copies on it
  Stream event_stream_ = nullptr;  // waits for the callers' events, in the order of submission
  std::unique_ptr<Copier> copier_;
  std::shared_ptr<Exchange> exchange_;
  std::vector<PartCopy> part_copies_;  // for the copier; kept for its memory
  EventPool events_;                   // starts and ends of transfers; timed
  StreamPoints points_;
  SlotStates states_;
  Transfers running_;                        // in the order of submission
  size_t entries_ = 0;                       // in flight
  std::vector<RelayedBytes> relayed_bytes_;  // of a closed channel
  Transfers retired_;  // ended, but another thread is about to wait for their events
};

}  // namespace kvswap
