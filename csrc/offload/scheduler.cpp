#include "offload/scheduler.h"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "check.h"
#include "offload/clock.h"
#include "offload/rejected.h"

namespace kvswap {
namespace {

// Names of the worker threads in ps and profilers: 15 characters at most.
constexpr const char* kThreadNames[kChannels] = {"kvswap-store", "kvswap-load", "kvswap-expedite"};

// Bytes of a large staged job that the thread in store() or load() submits: they keep the link busy
// until the worker has woken up.
constexpr uint64_t kBegunBytes = 3 << 20;

// Limits of what is joined into one copy. More jobs are joined while a thread waits for them.
constexpr size_t kJoinedBytes = size_t{32} << 20, kJoinedEntries = 200;
constexpr size_t kJoinedJobs = 256, kFlushedJobs = 8192;

// For close() to wait for copies that may wait for a lost relay.
constexpr double kMaxSecondsForLost = 1;

using Seconds = std::chrono::duration<double>;
constexpr Seconds kShortPause{50e-6}, kLongPause{1e-3};

// The copy method in a Result: that of the first part, not counting an unstaged head or tail.
CopyMethod method_of(const Transfer& transfer, CopyMethod planned) {
  for (const TransferPart& part : transfer.parts) {
    if (!part.is_head_or_tail) return part.method;
  }
  return planned;
}

bool packs_in_order(const Work& work, const std::vector<Group>& groups) {
  return std::any_of(work.parts.begin(), work.parts.end(), [&](const JobPart& part) {
    return groups[part.group].encoding->packs_in_order();
  });
}

// The latest jobs that these jobs must not overlap with. Those of their own channel are before them
// in its stream, but a store may be packed on another one.
JobNumbers latest_before(const JobList& jobs, const std::vector<Group>& groups) {
  JobNumbers latest = kNoJobs;
  for (const Job& job : jobs) {
    for (int channel = 0; channel < kChannels; ++channel) {
      if (channel == job.channel && (channel != kStores || !packs_in_order(*job.work, groups))) {
        continue;
      }
      latest[channel] = std::max(latest[channel], job.work->runs_after[channel]);
    }
  }
  return latest;
}

}  // namespace

Scheduler::Scheduler(std::vector<Group> groups, int64_t layers, Device& device, bool submit_thread,
                     const CopyMethodOptions& options)
    : device_(device),
      layers_(layers),
      submit_thread_(submit_thread && !device.is_synchronous()),
      caller_seconds_(options.caller_seconds),
      groups_(std::move(groups)),
      table_(groups_),
      queues_{{kStores, device}, {kLoads, device}, {kExpedited, device}},
      planner_(
          groups_, device, options,
          {&queues_[kStores].channel, &queues_[kLoads].channel, &queues_[kExpedited].channel}) {}

void Scheduler::check_open(const Lock&) const {
  KVSWAP_CHECK(!closed_, "the handler is closed; make a new one");
  if (!device_loss_.empty()) fail<DeviceLostError>(device_loss_.c_str());
}

ChannelMetrics Scheduler::metrics(const Lock&, int channel) const {
  const Queue& queue = queues_[channel];
  ChannelMetrics metrics = table_.metrics(channel);
  metrics.queued = queue.num_queued;
  metrics.running = queue.channel.num_running_jobs();
  metrics.streams = queue.channel.num_streams();
  metrics.events = queue.channel.num_events();
  for (const auto& [device, bytes] : queue.channel.relayed_bytes())
    metrics.relayed_bytes.emplace_back(device, bytes);
  if (channel == kLoads && planner_.exchange())
    metrics.exchanged_bytes = planner_.exchange()->bytes();
  return metrics;
}

// A new job.

Reason Scheduler::prepare(const Lock& lock, Job& job) {
  // A few at a time: a submission does not pay for all that has ended. Before the job is planned,
  // because how long they took may change its copy method.
  if (queue_of(job).channel.num_running() > kMaxRunning / 4) advance(lock, 2);
  job.work->submitted_at = now();
  planner_.plan(job);
  for (const JobPart& part : job.work->parts) {
    job.link_bytes += part.count * groups_[part.group].link_bytes(job.layer_groups, layers_);
  }
  const Reason failure = table_.prepare(job);
  return device_loss_.empty() ? failure : device_loss_;
}

Reason Scheduler::start_after(const Lock& lock, Job& job, const std::vector<After>& after) {
  try {
    job.work->after = queue_of(job).channel.record_point(after);
    return {};
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    const Reason reason(error);
    check_alive(lock, reason);
    return reason;
  }
}

void Scheduler::submit(Lock& lock, const JobRef& job, const Reason& failure,
                       double began) noexcept {
  table_.add(job);
  if (!failure.empty()) {
    end_unsubmitted(*job, State::kFailed, failure);
  } else {
    job->submit_seconds = now() - began;  // another thread may see it end at once
    submit_or_queue(lock, job);
    if (device_.is_synchronous()) {
      flush(lock, *job, job->layer_groups);
      advance(lock);
    }
  }
  job->submit_seconds = now() - began;
  table_.record_submit(job->channel, job->submit_seconds);
}

bool Scheduler::Queue::has_submitted_until(int64_t id) const {
  if (submitting >= 0) return id < submitting;
  return jobs.empty() || id < jobs.front().id;
}

// Whether the jobs of other channels that must not overlap with this work were submitted.
bool Scheduler::all_before_are_submitted(const Queue& queue, const Work& work) const {
  for (const Queue& other : queues_) {
    if (&other != &queue && !other.has_submitted_until(work.runs_after[other.channel.number()]))
      return false;
  }
  return true;
}

bool Scheduler::can_submit(const Queue& queue, const Job& job, int64_t flush_until) const {
  if (queue.submitting >= 0) return false;
  if (job.id > flush_until && !queue.channel.has_room_for(job.work->entries)) return false;
  if (!queue.channel.has_states_for(job.work->rejectable_blocks)) return false;
  return all_before_are_submitted(queue, *job.work);
}

void Scheduler::submit_or_queue(Lock& lock, const JobRef& job) noexcept {
  Queue& queue = queue_of(*job);
  const bool is_small = job->work->submit_seconds <= caller_seconds_;
  if (!is_small && !ensure_worker(queue, *job)) return;
  const bool may_begin = is_small || job->work->is_staged;
  if (!submit_thread_ && may_begin && queue.jobs.empty() && can_submit(queue, *job, kNoFlush)) {
    queue.submitting = job->id;
    JobList jobs;
    jobs.push_back(job);
    return submit_jobs(lock, queue, std::move(jobs), is_small ? kAllBytes : kBegunBytes);
  }
  if (!ensure_worker(queue, *job)) return;
  job->work->was_queued = true;
  ++queue.num_queued;
  queue.jobs.push_back(job);
  queue.wake_worker.notify_one();
}

// Ends the job, and returns false, where no thread can be started.
bool Scheduler::ensure_worker(Queue& queue, Job& job) noexcept {
  if (queue.worker.joinable()) return true;
  try {
    queue.worker = std::thread([this, &queue, name = kThreadNames[job.channel]] {
      pthread_setname_np(pthread_self(), name);
      run_worker(queue);
    });
  } catch (const std::exception& error) {
    const Reason why(error);
    const auto text = [&] { return std::string("no thread can be started: ") + why.c_str(); };
    end_unsubmitted(job, State::kFailed,
                    Reason(text, "no thread can be started: out of host memory"));
    return false;
  }
  return true;
}

// Submitting.
//
// submit_transfer(), enqueue() and fail_unsubmitted() return false if one transfer of several jobs
// failed: then `jobs` has all of them, and the caller tries them one at a time. Otherwise all jobs
// are on the device or have ended, or the transfer is in Queue::begun.

// Submits jobs as one transfer, or each by itself if that fails. bytes: see Channel::enqueue();
// for a single job, because only one job can be in Queue::begun.
void Scheduler::submit_jobs(Lock& lock, Queue& queue, JobList jobs, uint64_t bytes) noexcept {
  JobList ready;
  while (!jobs.empty()) {
    const JobRef job = jobs.pop_front();
    job->work->submission_started = true;
    const Reason reason = table_.source_failure(*job);
    reason.empty() ? ready.push_back(job) : end_unsubmitted(*job, State::kFailed, reason);
  }
  if (ready.size() > 1) bytes = kAllBytes;
  if (!ready.empty() && !submit_transfer(lock, queue, ready, bytes)) {
    while (!ready.empty()) {  // each by itself, so that only that one fails
      JobList one;
      one.push_back(ready.pop_front());
      submit_transfer(lock, queue, one, kAllBytes);
    }
  }
  end_submission(queue);
}

// The rest of a transfer is for the worker, or for a thread that waits for it.
void Scheduler::end_submission(Queue& queue) noexcept {
  if (queue.begun.empty()) {
    queue.submitting = -1;
  } else {
    queue.wake_worker.notify_one();
  }
  progress_.notify_all();  // the worker may wait for that
}

// Submits jobs as one transfer.
bool Scheduler::submit_transfer(Lock& lock, Queue& queue, JobList& jobs, uint64_t bytes) noexcept {
  if (!device_loss_.empty()) return fail_unsubmitted(jobs, device_loss_);
  const JobNumbers runs_after = latest_before(jobs, groups_);
  std::vector<std::shared_ptr<Transfer>> held;  // until the driver waits for their ends
  std::vector<Event> wait_events;
  Transfers made;
  try {
    held = transfers_before(runs_after);
    wait_events.reserve(jobs.size() + held.size());
    for (const Job& job : jobs) {
      if (job.work->after != nullptr) wait_events.push_back(job.work->after->event);
    }
    for (const auto& before : held) wait_events.push_back(before->ends.back());
    made = make_transfer(queue, jobs);
  } catch (const std::exception& error) {
    const Reason reason(error);
    check_alive(lock, reason);
    return fail_unsubmitted(jobs, reason);
  }
  Transfer& transfer = *made.front();
  transfer.jobs = std::move(jobs);
  transfer.runs_after = runs_after;
  const double began = now();
  for (Job& job : transfer.jobs) {
    job.queue_seconds = job.work->was_queued ? began - job.work->submitted_at : 0;
  }
  return enqueue(lock, queue, std::move(made), wait_events, bytes, jobs);
}

// Submits what is left of a transfer. bytes: see Channel::enqueue().
void Scheduler::submit_rest(Lock& lock, Queue& queue, uint64_t bytes) noexcept {
  JobList jobs;
  enqueue(lock, queue, std::exchange(queue.begun, {}), {}, bytes, jobs);
  end_submission(queue);
}

// The transfers in flight with these jobs: in each channel the newest one, which ends last.
std::vector<std::shared_ptr<Transfer>> Scheduler::transfers_before(
    const JobNumbers& runs_after) const {
  std::vector<std::shared_ptr<Transfer>> found;
  for (const Queue& other : queues_) {
    auto before = other.channel.newest_until(runs_after[other.channel.number()]);
    if (before) found.push_back(std::move(before));
  }
  return found;
}

Transfers Scheduler::make_transfer(Queue& queue, const JobList& jobs) {
  std::vector<TransferPart> parts = planner_.parts_of(jobs, queue.channel.is_idle());
  const int layer_groups = jobs.front().layer_groups;
  const Work& first = *jobs.front().work;
  const size_t entries =
      first.is_exchanged ? first.entries : planner_.entries_of(parts, layer_groups);
  Transfers made = queue.channel.make_transfer(layer_groups, std::move(parts), groups_);
  made.front()->entries = entries;
  return made;
}

// Gives the copies to the device without the lock, and records that they were submitted, or why
// not.
bool Scheduler::enqueue(Lock& lock, Queue& queue, Transfers made,
                        const std::vector<Event>& wait_events, uint64_t bytes,
                        JobList& jobs) noexcept {
  Transfer& transfer = *made.front();
  Reason error;
  bool alive = true;
  do {
    lock.unlock();
    error = queue.channel.enqueue(transfer, wait_events, groups_, layers_, bytes);
    // Before it waits for streams, which wait for other ranks.
    if (!error.empty() && transfer.is_exchanged()) planner_.exchange()->end(Exchange::kFailed);
    if (!error.empty() && transfer.has_begun) alive = queue.channel.synchronize();
    if (!error.empty() && alive) alive = queue.channel.is_alive();
    lock.lock();
    if (error.empty()) on_enqueued(made.front());
  } while (error.empty() && device_loss_.empty() && !transfer.is_enqueued() && bytes == kAllBytes);
  if (error.empty() && device_loss_.empty()) {
    transfer.is_enqueued() ? on_submitted(queue, std::move(made)) : queue.begun.swap(made);
    return true;
  }
  jobs = std::move(made.front()->jobs);
  queue.channel.retire(std::move(made));
  if (!alive && device_loss_.empty()) mark_lost(error);
  return fail_unsubmitted(jobs, error);
}

// Ends a single job as failed; on a lost device, all jobs, for that reason.
bool Scheduler::fail_unsubmitted(JobList& jobs, const Reason& error) noexcept {
  if (device_loss_.empty() && jobs.size() > 1) return false;
  const Reason& why = device_loss_.empty() ? error : device_loss_;
  while (!jobs.empty()) end_unsubmitted(*jobs.pop_front(), State::kFailed, why);
  return true;
}

// The driver has accepted layer groups, for which streams may wait now.
void Scheduler::on_enqueued(const std::shared_ptr<Transfer>& transfer) noexcept {
  for (Job& job : transfer->jobs) {
    job.work->transfer = transfer;
    job.work->enqueued_layer_groups = transfer->layer_group;
  }
  progress_.notify_all();
}

// The driver has accepted all copies.
void Scheduler::on_submitted(Queue& queue, Transfers made) noexcept {
  const std::shared_ptr<Transfer>& transfer = made.front();
  table_.record_transfer(queue.channel.number());
  for (Job& job : transfer->jobs) {
    queue.channel.release_point(std::exchange(job.work->after, nullptr));
    job.copy_method = method_of(*transfer, job.copy_method);
    job.state = State::kRunning;
  }
  queue.channel.add_running(std::move(made));
  progress_.notify_all();
}

void Scheduler::flush(Lock& lock, const Job& job, int layer_groups) noexcept {
  flush_until_ = std::max(flush_until_, job.id);
  progress_.notify_all();
  const uint64_t bytes = layer_groups < job.layer_groups ? kBegunBytes : kAllBytes;
  while (job.state == State::kQueued && job.work->enqueued_layer_groups < layer_groups) {
    if (submit_queued(lock, job, kNoLimit, bytes)) continue;
    device_.catch_up() ? advance(lock) : progress_.wait(lock);
  }
}

bool Scheduler::submit_queued(Lock& lock, const Job& job, double seconds, uint64_t bytes) noexcept {
  Queue& queue = queues_[job.channel];
  const bool is_begun = !queue.begun.empty();
  if (submit_thread_ || (!is_begun && !plan_first(queue))) return false;
  const Job& first = is_begun ? queue.begun.front()->jobs.front() : queue.jobs.front();
  const bool may_block = first.work->entries > kMaxEntries;  // in the driver, whose queue is full
  const bool is_quick = first.work->submit_seconds < seconds;
  // Beyond the channel's limits the driver's queue may be full, and the thread has to come back.
  const int64_t flush_until = seconds < kNoLimit ? kNoFlush : flush_until_;
  if (may_block || !is_quick || !(is_begun || can_submit(queue, first, flush_until))) return false;
  std::optional<ContextGuard> context;
  try {
    context.emplace(device_);
  } catch (const std::exception& error) {
    mark_lost(Reason(error));
    return true;
  }
  is_begun ? submit_rest(lock, queue, bytes)
           : submit_jobs(lock, queue, take_jobs(queue, flush_until, seconds), bytes);
  return true;
}

// Removes cancelled jobs from the front of the queue, and plans the first one that is left again:
// its copy method may have changed meanwhile. False if no job is left.
bool Scheduler::plan_first(Queue& queue) noexcept {
  while (!queue.jobs.empty() && queue.jobs.front().has_ended()) queue.jobs.pop_front();
  if (queue.jobs.empty()) return false;
  planner_.plan(queue.jobs.front());
  return true;
}

// The worker: submits what is queued in its order, small jobs joined.

void Scheduler::run_worker(Queue& queue) noexcept {
  prctl(PR_SET_TIMERSLACK, 1);  // else a short pause is 50 us longer
  Lock lock(mutex_);
  std::optional<ContextGuard> context;
  try {
    context.emplace(device_);
  } catch (const std::exception& error) {
    mark_lost(Reason(error));
  }
  Seconds pause = kShortPause;
  for (;;) {
    queue.wake_worker.wait(
        lock, [&] { return stopping_ || !queue.jobs.empty() || !queue.begun.empty(); });
    if (!queue.begun.empty()) {
      submit_rest(lock, queue);
      pause = kShortPause;
      continue;
    }
    if (queue.jobs.empty()) return;
    advance(lock);
    // A job at the front may be cancelled; can_submit() is for jobs that will be submitted.
    if (!plan_first(queue)) continue;
    if (can_submit(queue, queue.jobs.front(), flush_until_)) {
      submit_jobs(lock, queue, take_jobs(queue, flush_until_, std::nullopt));
      pause = kShortPause;
    } else {
      // The job waits until another thread submits an earlier job, or the device ends one.
      progress_.wait_for(lock, pause);
      pause = std::min(2 * pause, kLongPause);
    }
  }
}

// Takes the first job of the queue, which is not empty, and the jobs that can be joined with it. If
// `seconds` is given, submitting all of them is expected to take less.
JobList Scheduler::take_jobs(Queue& queue, int64_t flush_until,
                             std::optional<double> seconds) noexcept {
  JobList jobs;
  double submit_seconds = 0;
  size_t bytes = 0, entries = 0, rejectable_blocks = 0;
  queue.submitting = queue.jobs.front().id;
  while (!queue.jobs.empty()) {
    Job& next = queue.jobs.front();
    if (next.has_ended()) {  // it was cancelled
      queue.jobs.pop_front();
      continue;
    }
    rejectable_blocks += next.work->rejectable_blocks;
    submit_seconds += next.work->submit_seconds;
    const bool is_quick = !seconds || submit_seconds < *seconds;
    if (!jobs.empty() && (!is_quick || !can_join(queue, jobs, bytes, entries, next, flush_until) ||
                          !queue.channel.has_states_for(rejectable_blocks))) {
      break;
    }
    bytes += next.nbytes;
    entries += next.work->entries;
    --queue.num_queued;
    jobs.push_back(queue.jobs.pop_front());
  }
  return jobs;
}

// Whether `next` can be copied together with the jobs. bytes, entries: of the jobs.
bool Scheduler::can_join(Queue& queue, const JobList& jobs, size_t bytes, size_t entries, Job& next,
                         int64_t flush_until) {
  const Job& first = jobs.front();
  Work& work = *next.work;
  const bool flushing = next.id <= flush_until;
  if (jobs.size() >= (flushing ? kFlushedJobs : kJoinedJobs)) return false;
  if (!flushing && bytes + next.nbytes > kJoinedBytes) return false;
  if (!flushing && entries + work.entries > kJoinedEntries) return false;
  for (const Job* job : {&first, static_cast<const Job*>(&next)}) {
    if (job->layer_groups > 1) return false;
  }
  if (work.is_exchanged || first.work->is_exchanged) return false;
  // Nothing may be written twice in one copy.
  if (work.runs_after[queue.channel.number()] >= first.id) return false;
  if (!all_before_are_submitted(queue, work)) return false;
  // What it starts after may itself come after one of the other jobs.
  if (work.after == nullptr) return true;
  if (!queue.channel.has_happened(*work.after)) return false;
  queue.channel.release_point(std::exchange(work.after, nullptr));
  return true;
}

void Scheduler::wait_for_progress(Lock& lock, double seconds) {
  progress_.wait_for(lock, Seconds(seconds));
}

// How jobs end: because their copies have, because they are cancelled, or with the device.

void Scheduler::advance(const Lock&, int max_transfers) noexcept {
  const auto is_idle = [](const Queue& queue) { return queue.channel.is_idle(); };
  const bool idle = std::all_of(queues_, queues_ + kChannels, is_idle);
  if (!device_loss_.empty() || idle) return;
  try {
    const ContextGuard context(device_);
    Queue* next;
    do {
      next = next_to_retire();
      if (next != nullptr) retire_first(*next);
    } while (next != nullptr && --max_transfers > 0);
  } catch (const std::bad_alloc&) {
    // There is no memory for an error's message. The next call meets the error again.
  } catch (const std::exception& error) {
    mark_lost(Reason(error));
  }
}

void Scheduler::catch_up(const Lock& lock, const Job* job) noexcept {
  const bool is_submitted = job != nullptr && job->work->transfer != nullptr;
  device_.catch_up(is_submitted ? job->work->transfer->ends.back() : nullptr);
  advance(lock);
}

// The channel with the oldest of the transfers that have ended, or null. A transfer that waited for
// others comes after them, also if its end is seen first.
Scheduler::Queue* Scheduler::next_to_retire() {
  Queue* next = nullptr;
  for (Queue& queue : queues_) {
    if (queue.channel.is_idle()) continue;
    Transfer& transfer = queue.channel.oldest();
    if (next != nullptr && transfer.first_id() > next->channel.oldest().first_id()) continue;
    if (all_before_are_retired(transfer) && queue.channel.has_ended(transfer)) next = &queue;
  }
  return next;
}

// Whether the jobs that this transfer waits for have ended. They were submitted before it.
bool Scheduler::all_before_are_retired(const Transfer& transfer) const {
  for (const Queue& other : queues_) {
    const int64_t latest = transfer.runs_after[other.channel.number()];
    if (!other.channel.is_idle() && other.channel.oldest().first_id() <= latest) return false;
  }
  return true;
}

void Scheduler::retire_first(Queue& queue) {
  const Transfer& transfer = queue.channel.oldest();
  Reason error;
  double seconds = 0;
  std::vector<RejectedBlock> rejected;
  try {
    seconds = queue.channel.copy_seconds(transfer);
    planner_.record_duration(transfer, seconds);
    rejected = find_rejected(transfer);
    if (transfer.is_exchanged()) {
      const std::string failure = planner_.exchange()->failure_of(transfer.exchanged_load);
      KVSWAP_CHECK(failure.empty(), failure);
    }
  } catch (const std::exception& problem) {
    if (!queue.channel.is_alive()) throw;
    error = Reason(problem);
  }
  for (Job& job : transfer.jobs) {
    job.copy_seconds = seconds;
    Reason reason = error.empty() ? table_.source_failure(job) : error;
    if (reason.empty() && !job.work->was_cancelled) reason = reject_blocks(job, rejected, groups_);
    const State state = job.work->was_cancelled ? State::kCancelled
                        : reason.empty()        ? State::kDone
                                                : State::kFailed;
    table_.finish(job, state, reason);
  }
  queue.channel.retire_first();
  progress_.notify_all();
}

// Ends a job that was never submitted.
void Scheduler::end_unsubmitted(Job& job, State state, const Reason& error) noexcept {
  Work& work = *job.work;
  Queue& queue = queue_of(job);
  if (work.is_exchanged)
    planner_.exchange()->end(Exchange::kFailed);  // the other ranks would wait for it
  queue.num_queued -= work.was_queued && !work.submission_started;
  queue.channel.release_point(work.after);
  const bool cancelled = state == State::kCancelled || work.was_cancelled;
  table_.finish(job, cancelled ? State::kCancelled : state, error);
  progress_.notify_all();
}

bool Scheduler::cancel(const Lock& lock, Job& job) noexcept {
  advance(lock);
  if (job.has_ended()) return false;
  job.work->was_cancelled = true;
  // The other ranks wait for an exchanged load.
  if (!job.work->submission_started && !job.work->is_exchanged)
    end_unsubmitted(job, State::kCancelled, {});
  return true;
}

void Scheduler::check_alive(const Lock&, const Reason& error) noexcept {
  if (device_loss_.empty() && !queues_[kStores].channel.is_alive()) mark_lost(error);
}

void Scheduler::mark_lost(const Reason& reason) noexcept {
  lost_at_ = now();
  if (planner_.exchange() != nullptr) planner_.exchange()->end(Exchange::kFailed);
  const auto text = [&] {
    return std::string("the device is lost: ") + reason.c_str() +
           "; only a new process can use it again";
  };
  device_loss_ = Reason(text, "the device is lost; only a new process can use it again",
                        Reason::Kind::kDeviceLost);
  for (Queue& queue : queues_) {
    while (!queue.channel.is_idle()) {
      for (Job& job : queue.channel.oldest().jobs) {
        table_.finish(job, job.work->was_cancelled ? State::kCancelled : State::kFailed,
                      device_loss_);
      }
      queue.channel.retire_first();
    }
    if (!queue.begun.empty()) {
      JobList jobs = std::move(queue.begun.front()->jobs);
      queue.channel.retire(std::exchange(queue.begun, {}));
      queue.submitting = -1;
      fail_unsubmitted(jobs, device_loss_);
    }
    while (!queue.jobs.empty()) {
      const JobRef job = queue.jobs.pop_front();
      if (!job->has_ended()) end_unsubmitted(*job, State::kFailed, device_loss_);
    }
  }
  progress_.notify_all();
}

// Rebinding and closing.

void Scheduler::rebind(const Lock&, std::vector<Group> groups) {
  MethodChooser chooser = planner_.prepare(groups);
  JobTable::BlockRecords blocks = table_.make_block_records(groups);
  std::optional<JobTable::SlotRecords> slots;
  const auto is_same_pool = [](const Group& before, const Group& now) {
    return before.ready_range == now.ready_range;
  };
  if (!std::equal(groups.begin(), groups.end(), groups_.begin(), is_same_pool))
    slots = JobTable::make_slot_records(groups);
  // From here on nothing fails. The old kernel tables go with `groups`.
  groups_.swap(groups);
  planner_.rebind(std::move(chooser));
  table_.rebind(std::move(blocks), std::move(slots));
}

void Scheduler::close(const Lock&) noexcept {
  closed_ = true;
  progress_.notify_all();  // for threads that wait to submit
}

bool Scheduler::is_drained(const Lock&) const {
  if (device_loss_.empty()) {
    if (!table_.all_have_ended()) return false;
    return planner_.exchange() == nullptr || planner_.exchange()->leave();
  }
  const auto is_drained = [](const Queue& queue) { return queue.channel.is_drained(); };
  if (std::all_of(queues_, queues_ + kChannels, is_drained)) return true;
  if (now() - lost_at_ < kMaxSecondsForLost) return false;
  fail<DeviceLostError>(device_.name(),
                        " waits for a relay that is lost, and may still use the memory of the "
                        "cache and the host pages: they stay allocated until the process ends");
}

void Scheduler::stop(Lock& lock) {
  stopping_ = true;
  for (Queue& queue : queues_) queue.wake_worker.notify_all();
  lock.unlock();
  for (Queue& queue : queues_) {
    if (queue.worker.joinable()) queue.worker.join();
  }
  lock.lock();
  for (Queue& queue : queues_) queue.channel.close();
  device_loss_.empty() ? planner_.close() : planner_.leak();
}

}  // namespace kvswap
