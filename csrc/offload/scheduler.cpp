#include "offload/scheduler.h"

#include <algorithm>

#include "offload/gate.h"

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
  if (job.id > flush_until_ && !channel.has_room_for(job.work->entries)) return false;
  for (const auto& other : channels) {
    if (other.get() != &channel && !other->is_past(job.work->behind[other->number])) return false;
  }
  return true;
}

void Dispatcher::dispatch(Lock& lock, const JobRef& job) noexcept {
  Channel& channel = channel_of(*job);
  // A few at a time: who submits does not pay for all that has ended.
  if (channel.running.size() > kMostRunning / 4) advance(2);
  if (!lost_.empty()) return abandon(*job, State::kFailed, lost_);
  const bool starts = !threaded_ && channel.queue.empty() && can_start(channel, *job);
  const bool is_small = job->work->enqueue_seconds <= kSmallSeconds;
  if (!(starts && is_small) && !has_worker(channel, *job)) return;
  if (starts && (is_small || can_be_divided(*job))) {
    channel.submitting = job->id;
    JobRow jobs;
    jobs.push_back(job);
    return start(lock, channel, std::move(jobs), is_small ? kNoLimit : kNowSeconds);
  }
  job->work->queued = true;
  ++channel.waiting;
  channel.queue.push_back(job);
  channel.work.notify_one();
}

bool Dispatcher::has_worker(Channel& channel, Job& job) noexcept {
  if (channel.worker.joinable()) return true;
  try {
    channel.worker = std::thread([this, &channel] { work(channel); });
  } catch (const std::exception& error) {
    const Reason why(error);
    const auto text = [&] { return std::string("no thread can be started: ") + why.c_str(); };
    abandon(job, State::kFailed, Reason(text, "no thread can be started: out of host memory"));
    return false;
  }
  return true;
}

bool Dispatcher::can_be_divided(const Job& job) const {
  const Work& work = *job.work;
  if (work.parts.size() != 1 || job.layer_groups > 1 || work.gate != nullptr) return false;
  return !groups[work.parts.front().group].host_is_pageable;
}

void Dispatcher::abandon(Job& job, State state, const Reason& error) noexcept {
  Work& work = *job.work;
  if (work.gate != nullptr && !lost_.empty()) {
    work.gate->let_through();
  } else if (work.gate != nullptr) {
    work.gate->open();  // if it is not, advance() tries again
  }
  Channel& channel = channel_of(job);
  channel.waiting -= work.queued && !work.enqueuing;
  channel.give_moment(work.after);
  const bool cancelled = state == State::kCancelled || work.cancelled;
  ledger.finish(job, cancelled ? State::kCancelled : state, error);
  progress.notify_all();
}

}  // namespace kvswap
