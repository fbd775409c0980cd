#include "offload/channel.h"

#include "cuda/context.h"

namespace kvswap {

Channel::Channel(int number, int device) : number_(number), device_(device) {
  // Now, because a busy GPU can hold up the creation of a stream.
  try {
    if (device_ >= 0) stream_ = cuda::create_stream();
    if (device_ >= 0) waiting_ = cuda::create_stream();
    copier_ = std::make_unique<Copier>(number, device, stream_);
  } catch (...) {
    close();
    throw;
  }
}

size_t Channel::num_running_jobs() const {
  size_t jobs = 0;
  for (const auto& transfer : running_) jobs += transfer->jobs.size();
  return jobs;
}

std::shared_ptr<Transfer> Channel::newest_until(int64_t id) const {
  for (auto transfer = running_.rbegin(); transfer != running_.rend(); ++transfer) {
    if ((*transfer)->first_id() <= id) return *transfer;
  }
  return nullptr;
}

bool Channel::has_room_for(size_t entries) const {
  if (running_.empty()) return true;
  return running_.size() < kMaxRunning && entries_ + entries <= kMaxEntries;
}

// The caller may record the event again, or destroy it, before the job starts.
StreamPoint* Channel::point_of_event(cuda::Event event) {
  const cuda::Result state = cuda::driver().query_event(event);
  if (state == cuda::kSuccess) return nullptr;
  if (state != cuda::kNotReady) KVSWAP_DRIVER_CHECK(state, "cuEventQuery");
  KVSWAP_DRIVER_CHECK(cuda::driver().wait_event(waiting_, event, 0),
                      "cuStreamWaitEvent for the event that the job starts after");
  return point_of_stream(waiting_);
}

Transfers Channel::make_transfer(int layer_groups) {
  Transfers made{std::make_shared<Transfer>()};
  if (device_ < 0) return made;
  Transfer& transfer = *made.front();
  transfer.ends.reserve(layer_groups);
  try {
    transfer.start = events_.take();
    while (static_cast<int>(transfer.ends.size()) < layer_groups) {
      transfer.ends.push_back(events_.take());
    }
  } catch (...) {
    give_events(transfer);
    throw;
  }
  return made;
}

void Channel::run(Transfers transfer) noexcept {
  entries_ += transfer.front()->entries;
  running_.splice(running_.end(), transfer);
}

void Channel::retire_first() noexcept {
  Transfers first;
  first.splice(first.end(), running_, running_.begin());
  entries_ -= first.front()->entries;
  retire(std::move(first));
}

void Channel::retire(Transfers transfer) noexcept {
  retired_.splice(retired_.end(), transfer);
  for (auto next = retired_.begin(); next != retired_.end();) {
    const auto waiting = next++;
    if (waiting->use_count() > 1) continue;
    give_events(**waiting);
    retired_.erase(waiting);
  }
}

void Channel::give_events(Transfer& transfer) noexcept {
  events_.give(transfer.start);
  for (const cuda::Event end : transfer.ends) events_.give(end);
}

Reason Channel::submit(Transfer& transfer, const std::vector<cuda::Event>& wait_events,
                       const std::vector<Group>& groups, int64_t layers, bool& copying) noexcept {
  copying = false;
  try {
    const cuda::Driver* driver = device_ < 0 ? nullptr : &cuda::driver();
    for (const cuda::Event event : wait_events) {
      KVSWAP_DRIVER_CHECK(driver->wait_event(stream_, event, 0), "cuStreamWaitEvent");
    }
    if (driver) KVSWAP_DRIVER_CHECK(driver->record_event(transfer.start, stream_), "cuEventRecord");
    copying = true;
    copy(transfer, {0, transfer.remainder}, groups, layers);
    return {};
  } catch (const std::exception& error) {
    return Reason(error);
  }
}

Reason Channel::submit_remainder(Transfer& transfer, const std::vector<Group>& groups,
                                 int64_t layers) noexcept {
  try {
    copy(transfer, {transfer.remainder, transfer.parts.size()}, groups, layers);
    return {};
  } catch (const std::exception& error) {
    return Reason(error);
  }
}

void Channel::copy(Transfer& transfer, PartRange parts, const std::vector<Group>& groups,
                   int64_t layers) {
  for (int group = 0; group < transfer.layer_groups(); ++group) {
    const cuda::Stream end = copier_->copy(transfer, parts, group, groups, layers);
    if (device_ < 0 || parts.end < transfer.parts.size()) continue;
    KVSWAP_DRIVER_CHECK(cuda::driver().record_event(transfer.ends[group], end), "cuEventRecord");
  }
}

bool Channel::has_ended(Transfer& transfer) const {
  if (device_ < 0 || transfer.end_seen) return true;
  const cuda::Result state = cuda::driver().query_event(transfer.ends.back());
  if (state == cuda::kNotReady) return false;
  KVSWAP_DRIVER_CHECK(state, "cuEventQuery");
  return transfer.end_seen = true;
}

double Channel::copy_seconds(const Transfer& transfer) const {
  float ms = 0;
  KVSWAP_DRIVER_CHECK(cuda::driver().elapsed_time(&ms, transfer.start, transfer.ends.back()),
                      "cuEventElapsedTime");
  return ms / 1e3;
}

bool Channel::is_alive() const {
  if (device_ < 0) return true;
  const cuda::Result state = cuda::driver().query_stream(stream_);
  return state == cuda::kSuccess || state == cuda::kNotReady;
}

void Channel::close() {
  if (device_ < 0) return;
  for (auto& transfer : retired_) give_events(*transfer);
  retired_.clear();
  events_.destroy_idle();
  points_.destroy();
  if (copier_ != nullptr) copier_->close();
  for (cuda::Stream* stream : {&stream_, &waiting_}) {
    if (*stream != nullptr) cuda::driver().destroy_stream(*stream);
    *stream = nullptr;
  }
}

}  // namespace kvswap
