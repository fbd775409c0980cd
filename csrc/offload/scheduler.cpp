#include "offload/scheduler.h"

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "cuda/context.h"
#include "offload/clock.h"
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

// What a result names: of several parts the first, but for what keeps the link busy beside it.
Path path_of(const Transfer& transfer, int planned) {
  for (const TransferPart& part : transfer.parts) {
    if (!part.is_edge) return part.path;
  }
  return static_cast<Path>(planned);
}

// What is joined into one copy; more when somebody waits for all of it to be enqueued.
constexpr size_t kJoinedBytes = size_t{32} << 20, kJoinedEntries = 200;
constexpr size_t kJoinedJobs = 256, kFlushedJobs = 8192;

using Seconds = std::chrono::duration<double>;
constexpr Seconds kShortPause{50e-6}, kLongPause{1e-3};

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

// How jobs are given to the device.

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

// The software queue: what is in it goes to the device in its order, small jobs joined.

void Dispatcher::work(Channel& channel) noexcept {
  prctl(PR_SET_TIMERSLACK, 1);  // else a short pause is 50 us longer
  Lock lock(mutex);
  std::optional<cuda::ContextGuard> context;
  try {
    if (device >= 0) context.emplace(device);
  } catch (const std::exception& error) {
    lose(Reason(error));
  }
  Seconds pause = kShortPause;
  for (;;) {
    channel.work.wait(
        lock, [&] { return stopping_ || !channel.begun.empty() || !channel.queue.empty(); });
    if (!channel.begun.empty()) {
      go_on(lock, channel);
      continue;
    }
    if (channel.queue.empty()) return;
    advance();
    // The first must be one that will be enqueued: whether it may start is asked next.
    while (!channel.queue.empty() && channel.queue.front().ended()) channel.queue.pop_front();
    if (channel.queue.empty()) continue;
    if (can_start(channel, channel.queue.front())) {
      start(lock, channel, take(channel), kNoLimit);
      pause = kShortPause;
    } else {
      // Another thread may have to enqueue something first, or the device to end something.
      progress.wait_for(lock, pause);
      pause = std::min(2 * pause, kLongPause);
    }
  }
}

JobRow Dispatcher::take(Channel& channel) noexcept {
  JobRow jobs;
  size_t bytes = 0, entries = 0;
  channel.submitting = channel.queue.front().id;
  while (!channel.queue.empty()) {
    Job& next = channel.queue.front();
    if (next.ended()) {  // it was cancelled
      channel.queue.pop_front();
      continue;
    }
    if (!jobs.empty() && !joins(channel, jobs, bytes, entries, next)) break;
    bytes += next.nbytes;
    entries += next.work->entries;
    --channel.waiting;
    next.work->enqueuing = true;
    jobs.push_back(channel.queue.pop_front());
  }
  return jobs;
}

bool Dispatcher::joins(Channel& channel, const JobRow& jobs, size_t bytes, size_t entries,
                       Job& next) {
  const Job& first = jobs.front();
  Work& work = *next.work;
  const bool flushing = next.id <= flush_until_;
  if (jobs.size() >= (flushing ? kFlushedJobs : kJoinedJobs)) return false;
  if (!flushing && bytes + next.nbytes > kJoinedBytes) return false;
  if (!flushing && entries + work.entries > kJoinedEntries) return false;
  for (const Job* job : {&first, static_cast<const Job*>(&next)}) {
    if (job->layer_groups > 1 || job->work->gate != nullptr) return false;
  }
  if (work.background != first.work->background) return false;
  // Nothing may be written twice in one copy.
  if (work.behind[channel.number] >= first.id) return false;
  for (const auto& other : channels) {
    if (other.get() != &channel && !other->is_past(work.behind[other->number])) return false;
  }
  // What it starts behind may be behind the end of one of the others.
  if (work.after == nullptr) return true;
  if (!channel.is_over(*work.after)) return false;
  channel.give_moment(std::exchange(work.after, nullptr));
  return true;
}

void Dispatcher::flush(Lock& lock, const Job& job) noexcept {
  flush_until_ = std::max(flush_until_, job.id);
  while (!job.ended() && job.state != State::kRunning && help(lock, kNoLimit)) {
  }
  progress.notify_all();
  progress.wait(lock, [&] { return job.ended() || job.state == State::kRunning; });
}

// How jobs end: because their copies have, because they are cancelled, or with the device.

void Dispatcher::advance(int most) noexcept {
  const auto is_idle = [](const auto& channel) { return channel->running.empty(); };
  const bool idle = std::all_of(channels.begin(), channels.end(), is_idle) && !has_closed_gates();
  if (!lost_.empty() || idle) return;
  try {
    const cuda::ContextGuard context(device);
    open_gates();
    Channel* next;
    do {
      next = next_to_retire();
      if (next != nullptr) retire_first(*next);
    } while (next != nullptr && --most > 0);
  } catch (const std::bad_alloc&) {
    // No memory for the message of an error: whoever asks next gets that.
  } catch (const std::exception& error) {
    lose(Reason(error));
  }
}

// That the driver did not open when their loads failed.
void Dispatcher::open_gates() noexcept {
  for (Gate* gate : gates) {
    if (gate->problem().empty()) continue;
    if (gate->open()) progress.notify_all();
    if (!gate->problem().empty()) check_alive(gate->problem());
  }
}

bool Dispatcher::has_closed_gates() const {
  const auto is_closed = [](const Gate* gate) { return !gate->problem().empty(); };
  return std::any_of(gates.begin(), gates.end(), is_closed);
}

// Of the copies that have ended the one that was submitted first: a job ends after those that it
// waited for.
Channel* Dispatcher::next_to_retire() {
  Channel* next = nullptr;
  for (const auto& channel : channels) {
    if (channel->running.empty()) continue;
    Transfer& transfer = *channel->running.front();
    if (next != nullptr && transfer.first_id() > next->running.front()->first_id()) continue;
    if (channel->has_ended(transfer) && sources_have_ended(transfer)) next = channel.get();
  }
  return next;
}

bool Dispatcher::sources_have_ended(const Transfer& transfer) const {
  for (const Job& job : transfer.jobs) {
    for (const JobRef& source : job.work->sources) {
      if (!source->ended()) return false;
    }
  }
  return true;
}

void Dispatcher::retire_first(Channel& channel) {
  const Transfer& transfer = *channel.running.front();
  Reason error;
  double seconds = 0;
  try {
    seconds = channel.copy_seconds(transfer);
    planner.note(transfer, seconds);
  } catch (const std::exception& problem) {
    if (!channel.is_alive()) throw;
    error = Reason(problem);
  }
  for (Job& job : transfer.jobs) {
    job.copy_seconds = seconds;
    const Reason reason = error.empty() ? ledger.failed_source(job) : error;
    const State state = job.work->cancelled ? State::kCancelled
                        : reason.empty()    ? State::kDone
                                            : State::kFailed;
    ledger.finish(job, state, reason);
  }
  channel.retire_first();
  progress.notify_all();
}

void Dispatcher::lose(const Reason& reason) noexcept {
  const auto text = [&] {
    return std::string("the device is lost: ") + reason.c_str() +
           "; only a new process can use it again";
  };
  lost_ = Reason(text, "the device is lost; only a new process can use it again");
  for (const auto& channel : channels) {
    while (!channel->running.empty()) {
      for (Job& job : channel->running.front()->jobs) {
        ledger.finish(job, job.work->cancelled ? State::kCancelled : State::kFailed, lost_);
      }
      channel->retire_first();
    }
    while (!channel->queue.empty()) {
      const JobRef job = channel->queue.pop_front();
      if (!job->ended()) abandon(*job, State::kFailed, lost_);
    }
  }
  for (Gate* gate : gates) {
    if (!gate->problem().empty()) gate->let_through();
  }
  progress.notify_all();
}

bool Dispatcher::cancel(Job& job) noexcept {
  advance();
  if (job.ended()) return false;
  job.work->cancelled = true;
  if (!job.work->enqueuing) abandon(job, State::kCancelled, {});
  return true;
}

void Dispatcher::check_alive(const Reason& error) noexcept {
  if (lost_.empty() && !channels.front()->is_alive()) lose(error);
}

void Dispatcher::rebind(std::vector<Group> of) {
  PathChooser chooser = planner.prepare(of);
  Hazards::Blocks blocks = hazards.make_blocks(of);
  // From here on nothing fails. The old tables go with `of`.
  groups.swap(of);
  planner.rebind(std::move(chooser));
  hazards.rebind(std::move(blocks));
}

void Dispatcher::stop(Lock& lock) {
  stopping_ = true;
  for (const auto& channel : channels) channel->work.notify_all();
  lock.unlock();
  for (const auto& channel : channels) {
    if (channel->worker.joinable()) channel->worker.join();
  }
  lock.lock();
  for (const auto& channel : channels) channel->close();
  lost_.empty() ? planner.close() : planner.leave();
}

}  // namespace kvswap
