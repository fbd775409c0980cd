#include "offload/handler.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "check.h"
#include "offload/clock.h"

namespace kvswap {
namespace {

// Seconds for which a thread polls for one end without the lock. By then other transfers may have
// ended and made room for queued jobs.
constexpr double kPollSeconds = 50e-6;

}  // namespace

Handler::Handler(std::vector<Group> groups, int64_t layers, Device& device, bool submit_thread,
                 const CopyMethodOptions& options)
    : scheduler_(std::move(groups), layers, device, submit_thread, options),
      reader_(scheduler_.groups(scheduler_.lock())) {}

bool Handler::check_open(bool wait) {
  const Lock lock = wait ? scheduler_.lock() : scheduler_.try_lock();
  if (lock) scheduler_.check_open(lock);
  return static_cast<bool>(lock);
}

JobRef Handler::submit(const Request& request) {
  Lock lock = scheduler_.lock();
  scheduler_.check_open(lock);
  ask_device(lock, [&] { refuse_captures(request); });
  scheduler_.check_open(lock);
  JobRef job = reader_.read(request, scheduler_.groups(lock));
  job->work->computed_from = scheduler_.jobs(lock).unreported_loads(request.computed_in);
  Reason failure = scheduler_.prepare(lock, *job);
  if (failure.empty()) failure = scheduler_.start_after(lock, *job, request.after);
  if (request.reserved != nullptr) job->pages = std::move(*request.reserved);
  scheduler_.submit(lock, job, failure, request.began);
  return job;
}

template <typename Call>
void Handler::ask_device(const Lock& lock, const Call& call) {
  if (!scheduler_.device_loss(lock).empty()) return;
  try {
    call();
  } catch (const std::exception& error) {
    scheduler_.check_alive(lock, Reason(error));
    if (scheduler_.device_loss(lock).empty()) throw;
  }
}

void Handler::refuse_capture(const StreamRef& stream, const char* noun) const {
  KVSWAP_CHECK(
      !device().is_capturing(stream), noun,
      " is capturing a graph: a replay would neither copy nor wait; call this outside of the "
      "capture");
}

void Handler::refuse_captures(const Request& request) const {
  for (const After& after : request.after) {
    if (after.is_event) continue;
    refuse_capture({device().index(), after.handle}, "the stream that the job would start after");
  }
}

bool Handler::report(size_t most, EndedJobs& to) noexcept {
  const Lock lock = scheduler_.lock();
  scheduler_.catch_up(lock);
  const EndedJobs& unreported = scheduler_.jobs(lock).unreported();
  for (; most > 0 && !unreported.empty(); --most) to.push_back(scheduler_.report_first(lock));
  return !unreported.empty();
}

void Handler::end_reservations() noexcept {
  const Lock lock = scheduler_.lock();
  scheduler_.advance(lock);
  scheduler_.end_reservations(lock);
}

std::vector<JobRef> Handler::unreported_failures() {
  const Lock lock = scheduler_.lock();
  std::vector<JobRef> failures;
  for (Job& job : scheduler_.jobs(lock).unreported()) {
    if (!job.has_succeeded()) failures.emplace_back(&job);
  }
  return failures;
}

std::vector<JobRef> Handler::jobs_using(const BlockLists& blocks) {
  const Lock lock = scheduler_.lock();
  scheduler_.advance(lock);
  return scheduler_.jobs(lock).unended_at(blocks);
}

void Handler::mark_written(const PageLists& pages, bool is_grouped) {
  const Lock lock = scheduler_.lock();
  const std::vector<Group>& groups = scheduler_.groups(lock);
  for (size_t g = 0; g < groups.size(); ++g) {
    const ArgumentNames names{is_grouped, static_cast<int>(g)};
    for (size_t i = 0; i < pages[g].size(); ++i) {
      const std::string name = item_of(names.list("page_ids"), static_cast<int64_t>(i));
      check_page(name, pages[g][i], groups[g].num_pages, *groups[g].ready_range);
    }
  }
  scheduler_.mark_written(lock, pages);
}

bool Handler::is_over(const Job& job) {
  const Lock lock = scheduler_.lock();
  return job.has_ended();
}

std::pair<State, bool> Handler::state_of(const Job& job) {
  const Lock lock = scheduler_.lock();
  return {job.state, job.work != nullptr && job.work->was_cancelled};
}

bool Handler::has_ended(const Job* job) {
  const Lock lock = scheduler_.lock();
  if (!job->has_ended()) scheduler_.catch_up(lock, job);
  return job->has_ended();
}

bool Handler::cancel(Job* job) {
  const Lock lock = scheduler_.lock();
  return scheduler_.cancel(lock, *job);
}

void Handler::wait(Job* job, int layer_group, const StreamRef& stream) {
  Lock lock = scheduler_.lock();
  scheduler_.advance(lock);
  // Whether or not the job has ended: that is a matter of timing.
  ask_device(lock, [&] { refuse_capture(stream, "the stream that is to wait"); });
  if (layer_group < 0) layer_group = job->layer_groups - 1;
  if (!job->has_ended()) scheduler_.flush(lock, *job, layer_group + 1);
  if (job->has_ended()) return;
  device().wait_event(stream, job->work->transfer->ends.at(layer_group));
}

int Handler::synchronize(const std::vector<Job*>& jobs, bool for_all, double seconds,
                         Unended& unended) {
  const double began = now();
  size_t ended = 0;
  bool failed = false;
  Lock lock = scheduler_.lock();
  const JobTable& table = scheduler_.jobs(lock);
  for (const int64_t last = table.last_id();;) {
    if (for_all) scheduler_.catch_up(lock);
    for (; ended < jobs.size(); ++ended) {
      if (!jobs[ended]->has_ended()) scheduler_.catch_up(lock, jobs[ended]);
      if (!jobs[ended]->has_ended()) break;
      failed |= !jobs[ended]->has_succeeded();
    }
    if (for_all ? table.all_have_ended_until(last) : ended == jobs.size()) {
      return failed || (for_all && table.has_unreported_failures()) ? 2 : 1;
    }
    const Job& next = for_all ? table.oldest_unended() : *jobs[ended];
    const double left = seconds - (now() - began);
    if (left <= 0) {
      const auto has_not_ended = [](const Job* job) { return !job->has_ended(); };
      const int64_t count = for_all ? table.num_unended_until(last)
                                    : std::count_if(jobs.begin(), jobs.end(), has_not_ended);
      unended = {count, next.id, next.channel};
      return 0;
    }
    wait_for_end(lock, next, left, began);
  }
}

bool Handler::wait_for_ended(double seconds) {
  const double began = now();
  Lock lock = scheduler_.lock();
  const JobTable& table = scheduler_.jobs(lock);
  for (;;) {
    scheduler_.catch_up(lock);
    if (!table.unreported().empty() || table.all_have_ended()) return true;
    const double left = seconds - (now() - began);
    if (left <= 0) return false;
    wait_for_end(lock, table.oldest_unended(), left, began);
  }
}

void Handler::wait_for_end(Lock& lock, const Job& job, double seconds, double began) {
  const bool is_queued = job.state == State::kQueued;
  if (is_queued && scheduler_.submit_queued(lock, job, seconds)) return;
  poll_end(lock, is_queued ? nullptr : job.work->transfer, began);
}

void Handler::poll_end(Lock& lock, std::shared_ptr<Transfer> transfer, double began) {
  if (!transfer) {  // queued, or about to be submitted by another thread
    scheduler_.wait_for_progress(lock, std::clamp((now() - began) / 100, kPollSeconds, 1e-3));
    return;
  }
  ++polling_;
  lock.unlock();
  bool has_happened = false;
  try {
    const ContextGuard context(device());
    const double until = now() + kPollSeconds;
    do {
      pause_since(began);
      has_happened = device().has_happened(transfer->ends.back());
    } while (!has_happened && now() < until);
  } catch (const std::exception&) {  // the next one that asks with the lock finds the device lost
  }
  lock.lock();
  transfer->end_seen |= has_happened;
  transfer.reset();
  if (--polling_ == 0) closing_.notify_all();
}

void Handler::rebind(std::vector<Group> groups) {
  const Lock lock = scheduler_.lock();
  scheduler_.check_open(lock);
  KVSWAP_CHECK(scheduler_.jobs(lock).all_have_ended(),
               "another thread has submitted a job while the cache was about to be rebound; let it "
               "wait until rebind() has returned");
  RequestReader reader(groups);
  scheduler_.rebind(lock, std::move(groups));
  reader_ = std::move(reader);
}

ChannelMetrics Handler::metrics(int channel) {
  const Lock lock = scheduler_.lock();
  scheduler_.advance(lock);
  return scheduler_.metrics(lock, channel);
}

void Handler::on_context_error(const Reason& error) {
  const Lock lock = scheduler_.lock();
  scheduler_.check_alive(lock, error);
}

bool Handler::close(double seconds) {
  const double began = now();
  Lock lock = scheduler_.lock();
  scheduler_.close(lock);
  for (;;) {
    scheduler_.catch_up(lock);
    if (stopping_ || scheduler_.is_drained(lock)) break;
    if (now() - began >= seconds) return false;
    lock.unlock();
    pause_since(began);
    lock.lock();
  }
  if (std::exchange(stopping_, true)) {  // another thread does it
    const auto left = std::chrono::duration<double>(seconds - (now() - began));
    return closing_.wait_for(lock, left, [&] { return stopped_; });
  }
  closing_.wait(lock, [&] { return polling_ == 0; });
  scheduler_.stop(lock);
  stopped_ = true;
  closing_.notify_all();
  return true;
}

}  // namespace kvswap
