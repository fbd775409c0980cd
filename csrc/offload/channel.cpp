#include "channel.h"

#include <algorithm>

#include "../copy/address_check.h"
#include "../copy/address_map.h"
#include "../copy/batch.h"
#include "../copy/host.h"
#include "../cuda_context.h"
#include "path.h"

namespace kvswap {

Channel::Channel(int number, int device) : number(number), device_(device) {
  if (device_ < 0) return;
  // Now, because a busy GPU can hold up the creation of a stream.
  try {
    stream_ = cuda::create_stream();
    waiting_ = cuda::create_stream();
  } catch (...) {
    close();
    throw;
  }
}

bool Channel::is_past(int64_t id) const {
  if (submitting >= 0) return id < submitting;
  return queue.empty() || id < queue.front()->id;
}

std::shared_ptr<Transfer> Channel::newest_until(int64_t id) const {
  for (auto transfer = running.rbegin(); transfer != running.rend(); ++transfer) {
    if ((*transfer)->first_id() <= id) return *transfer;
  }
  return nullptr;
}

bool Channel::has_room_for(size_t entries) const {
  if (running.empty()) return true;
  return running.size() < kMostRunning && entries_ + entries <= kMostEntries;
}

// The caller may record the event again, or destroy it, before the job starts.
Moment* Channel::moment_of_event(cuda::Event event) {
  const cuda::Result state = cuda::driver().query_event(event);
  if (state == cuda::kSuccess) return nullptr;
  if (state != cuda::kNotReady) KVSWAP_DRIVER_CHECK(state, "cuEventQuery");
  KVSWAP_DRIVER_CHECK(cuda::driver().wait_event(waiting_, event, 0),
                      "cuStreamWaitEvent for the event that the job starts behind");
  return moment_of_stream(waiting_);
}

std::shared_ptr<Transfer> Channel::make_transfer(std::vector<JobRef> jobs) {
  auto transfer = std::make_shared<Transfer>();
  const int parts = jobs.front()->layer_groups;
  transfer->jobs = std::move(jobs);
  if (device_ < 0) return transfer;
  try {
    transfer->start = events_.take();
    while (static_cast<int>(transfer->ends.size()) < parts) {
      transfer->ends.push_back(events_.take());
    }
  } catch (...) {
    give_events(*transfer);
    throw;
  }
  return transfer;
}

void Channel::run(std::shared_ptr<Transfer> transfer) {
  entries_ += transfer->entries;
  running.push_back(std::move(transfer));
}

void Channel::retire(std::shared_ptr<Transfer> transfer) {
  if (!running.empty() && running.front() == transfer) {
    entries_ -= transfer->entries;
    running.pop_front();
  }
  retired_.push_back(std::move(transfer));
  for (auto& waiting : retired_) {
    if (waiting.use_count() > 1) continue;
    give_events(*waiting);
    waiting.reset();
  }
  retired_.erase(std::remove(retired_.begin(), retired_.end(), nullptr), retired_.end());
}

void Channel::give_events(Transfer& transfer) {
  events_.give(transfer.start);
  for (const cuda::Event end : transfer.ends) events_.give(end);
}

std::string Channel::enqueue(Transfer& transfer, const std::vector<cuda::Event>& behind,
                             const std::vector<Group>& groups, int64_t layers, bool& copying) {
  copying = false;
  try {
    const cuda::Driver* driver = device_ < 0 ? nullptr : &cuda::driver();
    for (const cuda::Event event : behind) {
      KVSWAP_DRIVER_CHECK(driver->wait_event(stream_, event, 0), "cuStreamWaitEvent");
    }
    if (driver) KVSWAP_DRIVER_CHECK(driver->record_event(transfer.start, stream_), "cuEventRecord");
    const int parts = transfer.jobs.front()->layer_groups;
    copying = true;
    for (int part = 0; part < parts; ++part) {
      copy(transfer, part, groups, layers);
      if (!driver) continue;
      KVSWAP_DRIVER_CHECK(driver->record_event(transfer.ends[part], stream_), "cuEventRecord");
    }
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

template <typename Visit>
void Channel::for_each_copy(const Transfer& transfer, const std::vector<Group>& groups,
                            const Visit& visit) const {
  for (const JobRef& job : transfer.jobs) {
    const int64_t *blocks = job->blocks(), *slots = job->slots();
    for (const Part& part : job->parts) {
      const Group& group = groups[part.group];
      visit(group, number == kStores
                       ? BlockCopy{&group.gpu, &group.host, blocks, slots, part.count, device_ < 0}
                       : BlockCopy{&group.host, &group.gpu, slots, blocks, part.count, true});
      blocks += part.count;
      slots += part.count;
    }
  }
}

void Channel::copy(const Transfer& transfer, int part, const std::vector<Group>& groups,
                   int64_t layers) {
  const int parts = transfer.jobs.front()->layer_groups;
  if (environment_.check_addresses) {
    FragmentList all(0);
    for_each_copy(transfer, groups, [&](const Group& group, const BlockCopy& copy) {
      add_fragments(all, copy, group.planes_of(part, parts, layers));
    });
    AddressMap addresses;
    check_addresses(all, addresses);
  }
  FragmentList fragments(0);
  for_each_copy(transfer, groups, [&](const Group& group, const BlockCopy& copy) {
    const PlaneRange planes = group.planes_of(part, parts, layers);
    const CopyPlan plan = plan_copy(group, planes, device_);
    if (plan.path == Path::kStrided) return copy_strided(copy, plan.runs, stream_);
    add_fragments(fragments, copy, planes);
  });
  if (fragments.empty()) return;
  if (device_ < 0) return copy_on_host(fragments);
  BatchOptions options(environment_);
  options.device = device_;
  options.has_pageable = any_is_pageable(groups);
  copy_batch(fragments, stream_, options);
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

bool Channel::synchronize() {
  return device_ < 0 || cuda::driver().synchronize_stream(stream_) == cuda::kSuccess;
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
  moments_.destroy();
  for (cuda::Stream* stream : {&stream_, &waiting_}) {
    if (*stream != nullptr) cuda::driver().destroy_stream(*stream);
    *stream = nullptr;
  }
}

}  // namespace kvswap
