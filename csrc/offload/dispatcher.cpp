#include "dispatcher.h"

#include <algorithm>

#include "clock.h"
#include "gate.h"

namespace kvswap {
namespace {

// What is enqueued by the thread that submits it: to wake another takes ten microseconds.
constexpr double kSmallSeconds = 50e-6;

std::vector<std::unique_ptr<Channel>> make_channels(int device) {
  std::vector<std::unique_ptr<Channel>> channels;
  for (int number = 0; number < kChannels; ++number) {
    channels.push_back(std::make_unique<Channel>(number, device));
  }
  return channels;
}

}  // namespace

Dispatcher::Dispatcher(std::vector<Group> of, int64_t layers, int device,
                       const kvswap_path_options& options)
    : device(device),
      groups(std::move(of)),
      hazards(groups),
      ledger(hazards),
      channels(make_channels(device)),
      planner(groups, device, options, channels),
      layers_(layers) {}

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
  if (channel.queue.empty() && job->enqueue_seconds <= kSmallSeconds && can_start(channel, *job)) {
    channel.submitting = job->id;
    return start(lock, channel, {job});
  }
  if (!channel.worker.joinable()) {
    try {
      channel.worker = std::thread([this, &channel] { work(channel); });
    } catch (const std::exception& error) {
      return abandon(job, State::kFailed, std::string("no thread can be started: ") + error.what());
    }
  }
  job->queued = true;
  ++channel.waiting;
  channel.queue.push_back(job);
  channel.work.notify_one();
}

void Dispatcher::start(Lock& lock, Channel& channel, std::vector<JobRef> jobs) {
  const std::vector<JobRef> all = jobs;
  try {
    for (const JobRef& job : all) {
      const std::string reason = ledger.failed_source(*job);
      if (!reason.empty()) abandon(job, State::kFailed, reason);
      job->enqueuing = true;
    }
    const auto has_ended = [](const JobRef& job) { return job->ended(); };
    jobs.erase(std::remove_if(jobs.begin(), jobs.end(), has_ended), jobs.end());
    if (!jobs.empty() && !attempt(lock, channel, jobs)) {
      // One of several that were joined: each by itself, so that only that one fails.
      for (const JobRef& job : jobs) attempt(lock, channel, {job});
    }
  } catch (const std::exception& error) {  // no memory, before anything was enqueued
    for (const JobRef& job : all) {
      if (job->state == State::kQueued) abandon(job, State::kFailed, error.what());
    }
  }
  channel.submitting = -1;
  progress.notify_all();
}

// False when it failed and is worth trying with one job at a time.
bool Dispatcher::attempt(Lock& lock, Channel& channel, const std::vector<JobRef>& jobs) {
  std::string error = lost_;
  bool copying = false, alive = true;
  std::shared_ptr<Transfer> transfer;
  std::vector<std::shared_ptr<Transfer>> held;
  if (error.empty()) {
    try {
      std::vector<TransferPart> parts = planner.parts_of(jobs);
      transfer = channel.make_transfer(jobs);
      transfer->parts = std::move(parts);
      transfer->entries = planner.entries_of(transfer->parts);
    } catch (const std::exception& problem) {
      error = problem.what();
    }
  }
  if (error.empty()) {
    std::vector<cuda::Event> behind;
    for (const JobRef& job : jobs) {
      if (job->after != nullptr) behind.push_back(job->after->event);
      for (const auto& other : channels) {
        auto before =
            other.get() == &channel ? nullptr : other->newest_until(job->behind[other->number]);
        if (before && (held.empty() || held.back() != before)) held.push_back(before);
      }
    }
    for (const auto& before : held) behind.push_back(before->ends.back());
    const double began = now();
    for (const JobRef& job : jobs) job->queue_seconds = job->queued ? began - job->submitted_at : 0;
    lock.unlock();
    error = channel.enqueue(*transfer, behind, groups, layers_, copying);
    if (error.empty() && jobs.front()->gate) error = jobs.front()->gate->open_behind(*transfer);
    if (!error.empty() && copying) alive = channel.synchronize();
    if (!error.empty() && alive) alive = channel.is_alive();
    const double seconds = device < 0 ? now() - began : 0;
    lock.lock();
    held.clear();
    if (error.empty() && lost_.empty()) {
      settle(channel, transfer, seconds);
      return true;
    }
    channel.retire(std::move(transfer));
  }
  if (!alive && lost_.empty()) lose(error);
  if (!lost_.empty()) error = lost_;
  if (lost_.empty() && jobs.size() > 1) return false;
  for (const JobRef& job : jobs) abandon(job, State::kFailed, error);
  return true;
}

// The copy has been enqueued; on the host it is done.
void Dispatcher::settle(Channel& channel, const std::shared_ptr<Transfer>& transfer,
                        double seconds) {
  ++ledger.metrics(channel.number).transfers;
  for (const JobRef& job : transfer->jobs) {
    channel.give_moment(job->after);
    job->after = nullptr;
    if (job->gate != nullptr) job->gate->busy = false;
    job->gate = nullptr;
    job->copy_seconds = seconds;
    if (!transfer->parts.empty()) job->path = static_cast<int>(transfer->parts.front().path);
    job->state = State::kRunning;
    job->transfer = transfer;
    if (device < 0) ledger.finish(job, State::kDone, "");
  }
  if (device >= 0) channel.run(transfer);
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
