#include "dispatcher.h"

#include <algorithm>

#include "gate.h"

namespace kvswap {
namespace {

// What is enqueued by the thread that submits it. Of larger jobs it enqueues the beginning: to wake
// another thread takes ten microseconds, and where the processor sleeps deeply hundreds.
constexpr double kSmallSeconds = 50e-6, kNowSeconds = 20e-6;

std::vector<std::unique_ptr<Channel>> make_channels(int device) {
  std::vector<std::unique_ptr<Channel>> channels;
  for (int number = 0; number < kChannels; ++number) {
    channels.push_back(std::make_unique<Channel>(number, device));
  }
  return channels;
}

}  // namespace

Dispatcher::Dispatcher(std::vector<Group> of, int64_t layers, int device, bool threaded,
                       const kvswap_path_options& options)
    : device(device),
      groups(std::move(of)),
      hazards(groups),
      ledger(hazards),
      channels(make_channels(device)),
      planner(groups, device, options, channels),
      layers_(layers),
      threaded_(threaded && device >= 0) {}

Dispatcher::~Dispatcher() = default;

bool Dispatcher::can_start(const Channel& channel, const Job& job) const {
  if (channel.submitting >= 0) return false;
  if (job.id > flush_until_ && !channel.has_room_for(job.entries)) return false;
  for (const auto& other : channels) {
    if (other.get() != &channel && !other->is_past(job.behind[other->number])) return false;
  }
  return true;
}

void Dispatcher::dispatch(Lock& lock, const JobRef& job) {
  Channel& channel = channel_of(*job);
  // A few at a time: who submits does not pay for all that has ended.
  if (channel.running.size() > kMostRunning / 4) advance(2);
  if (!lost_.empty()) return abandon(job, State::kFailed, lost_);
  const bool starts = !threaded_ && channel.queue.empty() && can_start(channel, *job);
  const bool is_small = job->enqueue_seconds <= kSmallSeconds;
  if (!(starts && is_small) && !has_worker(channel, job)) return;
  if (starts && (is_small || can_be_divided(*job))) {
    channel.submitting = job->id;
    return start(lock, channel, {job}, is_small ? kNoLimit : kNowSeconds);
  }
  job->queued = true;
  ++channel.waiting;
  channel.queue.push_back(job);
  channel.work.notify_one();
}

bool Dispatcher::has_worker(Channel& channel, const JobRef& job) {
  if (channel.worker.joinable()) return true;
  try {
    channel.worker = std::thread([this, &channel] { work(channel); });
  } catch (const std::exception& error) {
    abandon(job, State::kFailed, std::string("no thread can be started: ") + error.what());
    return false;
  }
  return true;
}

bool Dispatcher::can_be_divided(const Job& job) const {
  if (job.parts.size() != 1 || job.layer_groups > 1 || job.gate != nullptr) return false;
  return !groups[job.parts.front().group].host_is_pageable;
}

void Dispatcher::abandon(const JobRef& job, State state, const std::string& error) {
  if (job->gate != nullptr && !lost_.empty()) {
    job->gate->let_through();
  } else if (job->gate != nullptr && !job->gate->open()) {
    unopened_.push_back(job->gate);
  }
  job->gate = nullptr;
  Channel& channel = channel_of(*job);
  channel.waiting -= job->queued && !job->enqueuing;
  channel.give_moment(job->after);
  job->after = nullptr;
  const bool cancelled = state == State::kCancelled || job->cancelled;
  ledger.finish(job, cancelled ? State::kCancelled : state, error);
  progress.notify_all();
}

}  // namespace kvswap
