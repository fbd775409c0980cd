#include <algorithm>
#include <optional>
#include <utility>

#include "../cuda_context.h"
#include "clock.h"
#include "dispatcher.h"
#include "gate.h"

// How jobs are given to the device.
namespace kvswap {
namespace {

// What a result names: of several parts the first, but for what keeps the link busy beside it.
Path path_of(const Transfer& transfer, int planned) {
  for (const TransferPart& part : transfer.parts) {
    if (!part.is_edge) return part.path;
  }
  return static_cast<Path>(planned);
}

}  // namespace

void Dispatcher::start(Lock& lock, Channel& channel, std::vector<JobRef> jobs, double seconds) {
  const std::vector<JobRef> all = jobs;
  try {
    for (const JobRef& job : all) {
      const std::string reason = ledger.failed_source(*job);
      if (!reason.empty()) abandon(job, State::kFailed, reason);
      job->enqueuing = true;
    }
    const auto has_ended = [](const JobRef& job) { return job->ended(); };
    jobs.erase(std::remove_if(jobs.begin(), jobs.end(), has_ended), jobs.end());
    if (!jobs.empty() && !attempt(lock, channel, jobs, seconds)) {
      // One of several that were joined: each by itself, so that only that one fails.
      for (const JobRef& job : jobs) attempt(lock, channel, {job}, kNoLimit);
    }
  } catch (const std::exception& error) {  // no memory, before anything was enqueued
    for (const JobRef& job : all) {
      if (job->state == State::kQueued) abandon(job, State::kFailed, error.what());
    }
  }
  if (channel.begun != nullptr) return channel.work.notify_one();
  channel.submitting = -1;
  progress.notify_all();
}

bool Dispatcher::help(Lock& lock, double seconds) {
  for (const auto& channel : channels) {
    const Transfer* begun = channel->begun.get();
    if (begun == nullptr || begun->jobs.front()->enqueue_seconds > seconds) continue;
    if (begun->entries > kMostEntries) continue;  // the driver may hold up who submits it
    std::optional<cuda::ContextGuard> context;
    try {
      context.emplace(device);
    } catch (const std::exception& error) {
      lose(error.what());
    }
    go_on(lock, *channel);
    return true;
  }
  return false;
}

// What the thread that submitted a job has begun.
void Dispatcher::go_on(Lock& lock, Channel& channel) {
  std::shared_ptr<Transfer> transfer = std::exchange(channel.begun, nullptr);
  transfer->late_seconds = now() - transfer->begun_at;
  std::string error = lost_;
  lock.unlock();
  if (error.empty()) error = channel.enqueue_later(*transfer, groups, layers_);
  end_attempt(lock, channel, std::move(transfer), std::move(error), true, 0);
  channel.submitting = -1;
  progress.notify_all();
}

// Enqueues what takes the calling thread `seconds`; the rest is begun. False when it failed and is
// worth trying with one job at a time.
bool Dispatcher::attempt(Lock& lock, Channel& channel, const std::vector<JobRef>& jobs,
                         double seconds) {
  std::shared_ptr<Transfer> transfer;
  try {
    if (lost_.empty()) transfer = make_transfer(channel, jobs, seconds);
  } catch (const std::exception& problem) {
    return give_up(jobs, problem.what());
  }
  if (transfer == nullptr) return give_up(jobs, lost_);
  std::vector<std::shared_ptr<Transfer>> held;
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
  bool copying = false;
  std::string error = channel.enqueue(*transfer, behind, groups, layers_, copying);
  if (error.empty() && jobs.front()->gate) error = jobs.front()->gate->open_behind(*transfer);
  const double took = device < 0 ? now() - began : 0;
  if (!error.empty() || transfer->later == transfer->parts.size()) {
    return end_attempt(lock, channel, std::move(transfer), error, copying, took);
  }
  lock.lock();
  transfer->begun_at = now();
  channel.begun = std::move(transfer);
  return true;
}

std::shared_ptr<Transfer> Dispatcher::make_transfer(Channel& channel,
                                                    const std::vector<JobRef>& jobs,
                                                    double seconds) {
  std::vector<TransferPart> parts = planner.parts_of(jobs, channel.running.empty());
  const size_t entries = planner.entries_of(parts);
  size_t later = parts.size();
  if (seconds < kNoLimit) later = split_later(parts, groups[parts.front().group], seconds);
  std::shared_ptr<Transfer> transfer = channel.make_transfer(jobs);
  transfer->parts = std::move(parts);
  transfer->later = later;
  transfer->entries = entries;
  return transfer;
}

// The copies have been enqueued, or could not be. Takes the lock.
bool Dispatcher::end_attempt(Lock& lock, Channel& channel, std::shared_ptr<Transfer> transfer,
                             const std::string& error, bool copying, double seconds) {
  bool alive = true;
  if (!error.empty() && copying) alive = channel.synchronize();
  if (!error.empty() && alive) alive = channel.is_alive();
  lock.lock();
  if (error.empty() && lost_.empty()) {
    settle(channel, transfer, seconds);
    return true;
  }
  const std::vector<JobRef> jobs = transfer->jobs;
  channel.retire(std::move(transfer));
  if (!alive && lost_.empty()) lose(error);
  return give_up(jobs, lost_.empty() ? error : lost_);
}

// True when that is the end of the jobs.
bool Dispatcher::give_up(const std::vector<JobRef>& jobs, const std::string& error) {
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
    job->path = static_cast<int>(path_of(*transfer, job->path));
    job->state = State::kRunning;
    job->transfer = transfer;
    if (device < 0) ledger.finish(job, State::kDone, "");
  }
  if (device >= 0) channel.run(transfer);
}

}  // namespace kvswap
