#include <algorithm>
#include <optional>
#include <utility>

#include "cuda/context.h"
#include "offload/clock.h"
#include "offload/gate.h"
#include "offload/scheduler.h"

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

void Dispatcher::start(Lock& lock, Channel& channel, JobRow jobs, double seconds) noexcept {
  JobRow ready;
  while (!jobs.empty()) {
    const JobRef job = jobs.pop_front();
    job->work->enqueuing = true;
    const Reason reason = ledger.failed_source(*job);
    reason.empty() ? ready.push_back(job) : abandon(*job, State::kFailed, reason);
  }
  if (!ready.empty() && !attempt(lock, channel, ready, seconds)) {
    while (!ready.empty()) {  // each by itself, so that only that one fails
      JobRow one;
      one.push_back(ready.pop_front());
      attempt(lock, channel, one, kNoLimit);
    }
  }
  if (!channel.begun.empty()) return channel.work.notify_one();
  channel.submitting = -1;
  progress.notify_all();
}

bool Dispatcher::help(Lock& lock, double seconds) noexcept {
  for (const auto& channel : channels) {
    if (channel->begun.empty()) continue;
    const Transfer& begun = *channel->begun.front();
    if (begun.jobs.front().work->enqueue_seconds > seconds) continue;
    if (begun.entries > kMostEntries) continue;  // the driver may hold up who submits it
    std::optional<cuda::ContextGuard> context;
    try {
      context.emplace(device);
    } catch (const std::exception& error) {
      lose(Reason(error));
    }
    go_on(lock, *channel);
    return true;
  }
  return false;
}

// What the thread that submitted a job has begun.
void Dispatcher::go_on(Lock& lock, Channel& channel) noexcept {
  Transfers made = std::exchange(channel.begun, {});
  Transfer& transfer = *made.front();
  transfer.late_seconds = now() - transfer.begun_at;
  Reason error = lost_;
  lock.unlock();
  if (error.empty()) error = channel.enqueue_later(transfer, groups, layers_);
  JobRow jobs;
  end_attempt(lock, channel, std::move(made), std::move(error), true, 0, jobs);
  channel.submitting = -1;
  progress.notify_all();
}

// Enqueues what takes the calling thread `seconds`; the rest is begun. False when it failed, and
// the jobs are worth trying one at a time.
bool Dispatcher::attempt(Lock& lock, Channel& channel, JobRow& jobs, double seconds) noexcept {
  if (!lost_.empty()) return give_up(jobs, lost_);
  std::vector<std::shared_ptr<Transfer>> held;  // until the driver knows whose ends are waited for
  std::vector<cuda::Event> behind;
  Transfers made;
  try {
    held = transfers_before(channel, jobs);
    behind.reserve(jobs.size() + held.size());
    for (const Job& job : jobs) {
      if (job.work->after != nullptr) behind.push_back(job.work->after->event);
    }
    for (const auto& before : held) behind.push_back(before->ends.back());
    made = make_transfer(channel, jobs, seconds);
  } catch (const std::exception& error) {
    return give_up(jobs, Reason(error));
  }
  Transfer& transfer = *made.front();
  transfer.jobs = std::move(jobs);
  const double began = now();
  for (Job& job : transfer.jobs) {
    job.queue_seconds = job.work->queued ? began - job.work->submitted_at : 0;
  }
  Gate* gate = transfer.jobs.front().work->gate;
  lock.unlock();
  bool copying = false;
  Reason error = channel.enqueue(transfer, behind, groups, layers_, copying);
  if (error.empty() && gate != nullptr) error = gate->open_behind(transfer);
  const double took = device < 0 ? now() - began : 0;
  if (!error.empty() || transfer.later == transfer.parts.size()) {
    return end_attempt(lock, channel, std::move(made), std::move(error), copying, took, jobs);
  }
  lock.lock();
  transfer.begun_at = now();
  channel.begun = std::move(made);
  return true;
}

// Those in flight in other channels that the jobs must not overlap with.
std::vector<std::shared_ptr<Transfer>> Dispatcher::transfers_before(const Channel& channel,
                                                                    const JobRow& jobs) const {
  std::vector<std::shared_ptr<Transfer>> found;
  for (const Job& job : jobs) {
    for (const auto& other : channels) {
      if (other.get() == &channel) continue;
      auto before = other->newest_until(job.work->behind[other->number]);
      if (before && (found.empty() || found.back() != before)) found.push_back(std::move(before));
    }
  }
  return found;
}

Transfers Dispatcher::make_transfer(Channel& channel, const JobRow& jobs, double seconds) {
  std::vector<TransferPart> parts = planner.parts_of(jobs, channel.running.empty());
  const size_t entries = planner.entries_of(parts);
  size_t later = parts.size();
  if (seconds < kNoLimit) later = split_later(parts, groups[parts.front().group], seconds);
  Transfers made = channel.make_transfer(jobs.front().layer_groups);
  Transfer& transfer = *made.front();
  transfer.parts = std::move(parts);
  transfer.later = later;
  transfer.entries = entries;
  return made;
}

// The copies have been enqueued, or could not be. Takes the lock. False, with the jobs, where they
// are worth trying one at a time.
bool Dispatcher::end_attempt(Lock& lock, Channel& channel, Transfers made, Reason error,
                             bool copying, double seconds, JobRow& jobs) noexcept {
  bool alive = true;
  if (!error.empty() && copying) alive = channel.synchronize();
  if (!error.empty() && alive) alive = channel.is_alive();
  lock.lock();
  if (error.empty() && lost_.empty()) {
    settle(channel, std::move(made), seconds);
    return true;
  }
  jobs = std::move(made.front()->jobs);
  channel.retire(std::move(made));
  if (!alive && lost_.empty()) lose(error);
  return give_up(jobs, lost_.empty() ? error : lost_);
}

// True when that is the end of the jobs.
bool Dispatcher::give_up(JobRow& jobs, const Reason& error) noexcept {
  if (lost_.empty() && jobs.size() > 1) return false;
  while (!jobs.empty()) abandon(*jobs.pop_front(), State::kFailed, error);
  return true;
}

// The copy has been enqueued; on the host it is done.
void Dispatcher::settle(Channel& channel, Transfers made, double seconds) noexcept {
  const std::shared_ptr<Transfer>& transfer = made.front();
  ++ledger.metrics(channel.number).transfers;
  for (Job& job : transfer->jobs) {
    channel.give_moment(std::exchange(job.work->after, nullptr));
    if (Gate* gate = std::exchange(job.work->gate, nullptr)) gate->opened();
    job.copy_seconds = seconds;
    job.path = static_cast<int>(path_of(*transfer, job.path));
    job.state = State::kRunning;
    job.work->transfer = transfer;
    if (device < 0) ledger.finish(job, State::kDone, {});
  }
  if (device >= 0) channel.run(std::move(made));
  progress.notify_all();
}

}  // namespace kvswap
