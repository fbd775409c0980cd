#pragma once

#include <condition_variable>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "offload/channel.h"
#include "offload/copy_plan.h"
#include "offload/group.h"
#include "offload/job_table.h"

namespace kvswap {

// The scheduler's lock, which the caller of a function with such a parameter holds. With
// `const Lock&` the function keeps it. With `Lock&` the function releases it meanwhile: to wait, or
// to give copies to the driver, which can take long.
using Lock = std::unique_lock<std::mutex>;

// Decides when a job is submitted to the device, and notices when it has ended. Each channel runs
// its jobs in order, and has a limited number in flight.
//
// Who gives copies to the driver:
// - The thread that calls store() or load(), if the job can start now and that takes at most
//   CopyMethodOptions::caller_seconds.
// - It also begins a larger job that is staged, so that its first bytes are on the link at once.
// - The channel's worker thread gives all else, unless a thread that waits for a job of the channel
//   comes first. Both join small jobs into one transfer.
// With `submit_thread` only the worker submits, except on a synchronous device.
//
// A thread submits without the lock, and owns the channel meanwhile. Queue::submitting is set until
// the transfer is completely submitted, also while its rest is in Queue::begun.
//
// One lock guards everything that a handler has. After a job was added nothing throws: an error,
// also lack of memory, ends that job as failed.
class Scheduler {
 public:
  static constexpr double kNoLimit = std::numeric_limits<double>::infinity();  // in seconds

  // The context of the device is current.
  Scheduler(std::vector<Group> groups, int64_t layers, Device& device, bool submit_thread,
            const CopyMethodOptions& options);

  // Need no lock: they never change.
  Device& device() const { return device_; }
  // Why some copies are slower than they could be, and how they are made, or "".
  const std::string& slower_copies() const { return planner_.slower_copies(); }

  Lock lock() { return Lock(mutex_); }
  Lock try_lock() { return Lock(mutex_, std::try_to_lock); }  // may hold nothing

  // State.

  // Throws if the handler is closed or its device lost.
  void check_open(const Lock&) const;
  // The error after which the device runs nothing any more, or an empty reason.
  const Reason& device_loss(const Lock&) const { return device_loss_; }
  const std::vector<Group>& groups(const Lock&) const { return groups_; }
  const JobTable& jobs(const Lock&) const { return table_; }
  ChannelMetrics metrics(const Lock&, int channel) const;

  // A new job.

  // Plans the job, and finds what it depends on. Returns why it cannot succeed, or an empty reason:
  // it may find the device lost. May throw std::bad_alloc. The job is not added before submit().
  Reason prepare(const Lock&, Job& job);
  // Makes the job start after all of these. Returns why that is not possible, or an empty reason.
  // May throw std::bad_alloc.
  Reason start_after(const Lock&, Job& job, const std::vector<After>& after);
  // Adds a prepared job; then submits it, queues it or, if `failure` is not empty, ends it. began:
  // when the caller's store() or load() began. When this returns, a job on a synchronous device has
  // ended.
  void submit(Lock& lock, const JobRef& job, const Reason& failure, double began) noexcept;

  // Progress.

  // Asks the device which transfers have ended, and ends their jobs, for `max_transfers` at most.
  void advance(const Lock&, int max_transfers = std::numeric_limits<int>::max()) noexcept;
  // The same for a thread that polls or waits on the host: a device that copies late copies first,
  // for this job, which has not ended, or all.
  void catch_up(const Lock&, const Job* job = nullptr) noexcept;
  // Waits until a job was submitted or has ended; for `seconds` at most.
  void wait_for_progress(Lock& lock, double seconds);
  // Waits until the first `layer_groups` layer groups of a job are on the device, or the job has
  // ended. The job and those before it are submitted beyond the channel's limits, so this waits for
  // the device only if the driver's queue is full.
  void flush(Lock& lock, const Job& job, int layer_groups) noexcept;
  // For a thread that waits for the job: submits the first job of that channel's queue before the
  // worker has woken up, which takes tens of microseconds, and hundreds where the processor sleeps
  // deeply. Only if the job can be submitted now, and in less than `seconds`; otherwise returns
  // false. With kNoLimit also beyond the channel's limits, after flush(). No context need be
  // current. bytes: see Channel::enqueue().
  bool submit_queued(Lock& lock, const Job& job, double seconds,
                     uint64_t bytes = kAllBytes) noexcept;
  // True when the job will be reported as cancelled.
  bool cancel(const Lock&, Job& job) noexcept;
  // See JobTable.
  void mark_written(const Lock&, const PageLists& pages) { table_.mark_written(pages); }
  // Takes the first job that was not reported. Call it only if there is one.
  JobRef report_first(const Lock&) noexcept { return table_.report_first(); }
  // See JobTable.
  void end_reservations(const Lock&) noexcept { table_.end_reservations(); }
  // After an error of the driver: ends every job as failed if the device does not answer any more.
  void check_alive(const Lock&, const Reason& error) noexcept;

  // Takes new groups while no job is outstanding. If it throws, nothing has changed.
  void rebind(const Lock&, std::vector<Group> groups);

  // See CopyPlanner. No job was submitted yet.
  bool join_exchange(const Lock&, const std::shared_ptr<Exchange>& exchange, uint64_t pools,
                     double seconds) {
    return planner_.join_exchange(exchange, queues_[kLoads].channel, pools, seconds);
  }

  // Closing.

  // From now on check_open() throws.
  void close(const Lock&) noexcept;
  // Whether all jobs have ended, and no other rank needs this one. Throws if the device waits for a
  // lost relay for ever: it may still use the memory of the jobs.
  bool is_drained(const Lock&) const;
  // Joins the worker threads, then frees streams, events and device memory. All jobs have ended.
  void stop(Lock& lock);

 private:
  // A channel, and its jobs that are not on the device yet.
  struct Queue {
    Queue(int number, Device& device) : channel(number, device) {}

    Channel channel;
    JobList jobs;             // queued; a cancelled job stays until it is at the front
    size_t num_queued = 0;    // of these; cancelled jobs do not count
    int64_t submitting = -1;  // number of the first job that a thread is submitting; -1 for none
    Transfers begun;          // of one job; no thread is giving its rest to the driver yet
    std::thread worker;       // submits queued jobs; started when it is first needed
    std::condition_variable wake_worker;  // to submit something, or to stop

    // Whether all jobs up to this number were submitted, or have ended.
    bool has_submitted_until(int64_t id) const;
  };

  static constexpr uint64_t kAllBytes = std::numeric_limits<uint64_t>::max();
  static constexpr int64_t kNoFlush = -1;

  Queue& queue_of(const Job& job) { return queues_[job.channel]; }
  bool all_before_are_submitted(const Queue& queue, const Work& work) const;
  // flush_until: jobs up to this number may be submitted beyond the channel's limits.
  bool can_submit(const Queue& queue, const Job& job, int64_t flush_until) const;
  void submit_or_queue(Lock& lock, const JobRef& job) noexcept;
  bool ensure_worker(Queue& queue, Job& job) noexcept;
  void run_worker(Queue& queue) noexcept;
  bool plan_first(Queue& queue) noexcept;
  JobList take_jobs(Queue& queue, int64_t flush_until, std::optional<double> seconds) noexcept;
  bool can_join(Queue& queue, const JobList& jobs, size_t bytes, size_t entries, Job& next,
                int64_t flush_until);

  void submit_jobs(Lock& lock, Queue& queue, JobList jobs, uint64_t bytes = kAllBytes) noexcept;
  bool submit_transfer(Lock& lock, Queue& queue, JobList& jobs, uint64_t bytes) noexcept;
  void submit_rest(Lock& lock, Queue& queue, uint64_t bytes = kAllBytes) noexcept;
  void end_submission(Queue& queue) noexcept;
  std::vector<std::shared_ptr<Transfer>> transfers_before(const JobNumbers& runs_after) const;
  Transfers make_transfer(Queue& queue, const JobList& jobs);
  bool enqueue(Lock& lock, Queue& queue, Transfers made, const std::vector<Event>& wait_events,
               uint64_t bytes, JobList& jobs) noexcept;
  void on_enqueued(const std::shared_ptr<Transfer>& transfer) noexcept;
  void on_submitted(Queue& queue, Transfers made) noexcept;
  bool fail_unsubmitted(JobList& jobs, const Reason& error) noexcept;
  void end_unsubmitted(Job& job, State state, const Reason& error) noexcept;

  Queue* next_to_retire();
  bool all_before_are_retired(const Transfer& transfer) const;
  void retire_first(Queue& queue);
  void mark_lost(const Reason& reason) noexcept;

  std::mutex mutex_;
  // A job was submitted or has ended, or the handler was closed.
  std::condition_variable progress_;

  Device& device_;
  const int64_t layers_;  // of the model, in all groups together
  const bool submit_thread_;
  const double caller_seconds_;
  std::vector<Group> groups_;
  JobTable table_;
  Queue queues_[kChannels];
  CopyPlanner planner_;
  Reason device_loss_;
  double lost_at_ = 0;
  // Jobs up to this number are submitted beyond the channel's limits, by threads that may block.
  int64_t flush_until_ = kNoFlush;
  bool closed_ = false;
  bool stopping_ = false;
};

}  // namespace kvswap
