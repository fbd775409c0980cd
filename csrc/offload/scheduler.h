#pragma once

#include <condition_variable>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "offload/channel.h"
#include "offload/copy_plan.h"
#include "offload/gate.h"
#include "offload/group.h"
#include "offload/job_table.h"

namespace kvswap {

// The scheduler's lock. A function that takes it must be called with the lock held. One that takes
// it as `Lock&` lets it go while it waits, or while the driver enqueues a copy, which can take
// long.
using Lock = std::unique_lock<std::mutex>;

constexpr double kNoLimit = std::numeric_limits<double>::infinity();  // in seconds

// Decides when a job goes to the device, and sees it end. Each channel runs its jobs in order, and
// not too many at a time.
//
// Who submits copies: the thread that submits a job, if that takes microseconds; of a larger job it
// submits the beginning. A worker thread of the channel, or a thread that waits for any job,
// submits the remainder. Jobs that must wait in software go through the worker, which joins small
// ones into one copy. With `submit_thread` the worker submits everything, except on a synchronous
// device. Copies are submitted without the lock, by the one thread that owns the channel:
// `submitting` is set meanwhile, and a partially submitted transfer keeps the channel until it is
// complete.
//
// One lock guards everything that a handler has. Once a job was added nothing throws: whatever
// fails, for want of memory too, ends that job.
class Scheduler {
 public:
  // The context of the device is current.
  Scheduler(std::vector<Group> groups, int64_t layers, Device& device, bool submit_thread,
            const kvswap_copy_method_options& options);
  // The handler was closed, or nothing was ever submitted.
  ~Scheduler();

  // Need no lock: they never change.
  Device& device() const { return device_; }
  // Why copy methods that would be chosen are not available, or "".
  const std::string& missing_methods() const { return planner_.problem(); }

  Lock lock() { return Lock(mutex_); }

  // State.

  // Throws if the handler is closed or its device lost.
  void check_open(const Lock&) const;
  // The error after which the device runs nothing any more, or an empty reason.
  const Reason& lost(const Lock&) const { return lost_; }
  const std::vector<Group>& groups(const Lock&) const { return groups_; }
  const JobTable& jobs(const Lock&) const { return table_; }
  kvswap_metrics metrics(const Lock&, int channel) const;

  // A new job.

  // Plans the job, and finds what it depends on. Returns why it cannot succeed, or an empty reason.
  // Throws std::bad_alloc; the job is unknown until submit().
  Reason prepare(const Lock&, Job& job);
  // Makes the job start after all that the stream was given so far, or after an event. The stream
  // is of the handler's device.
  void start_after_stream(const Lock&, Job& job, Stream stream);
  void start_after_event(const Lock&, Job& job, Event event);
  // Takes that back.
  void start_at_once(const Lock&, Job& job) noexcept;
  // Adds a prepared job and submits it, queues it or, with a failure, ends it. began: when its
  // caller began. A job with a gate, or between host memory, is on the device or has ended when
  // this returns.
  void submit(Lock& lock, const JobRef& job, const Reason& failure, double began) noexcept;

  // Progress.

  // Ends the jobs whose transfers have ended on the device, `max_transfers` of them at most, and
  // opens gates that the driver refused to open before.
  void advance(const Lock&, int max_transfers = std::numeric_limits<int>::max()) noexcept;
  // Waits until a job was submitted or has ended, or a gate was opened; for `seconds` at most.
  void wait_for_progress(Lock& lock, double seconds);
  // Waits until a job is on the device, or has ended. What is ahead of it is not held back any
  // more, so this waits for the device only when the driver has no room left.
  void flush(Lock& lock, const Job& job) noexcept;
  // Submits the remainder of a partially submitted transfer whose worker, which may take long to
  // wake up, has not done so yet. For threads that wait: only a remainder that takes `seconds` at
  // most, and that the driver has room for. No context need be current. False if there is none.
  bool submit_remainder(Lock& lock, double seconds) noexcept;
  // True when the job will be reported as cancelled.
  bool cancel(const Lock&, Job& job) noexcept;
  // Takes the first job that was not reported; there is one.
  JobRef report_first(const Lock&) noexcept { return table_.report_first(); }
  // After an error of the driver: ends every job as failed if the device does not answer any more.
  void check_alive(const Lock&, const Reason& error) noexcept;

  // Gates.

  Gate* make_gate(const Lock&, int layer_groups);
  // Waits until no earlier load keeps the gate. Throws when the handler is closed or its device
  // lost meanwhile, or when the driver does not open the gate.
  void wait_for_gate(Lock& lock, const Gate& gate);

  // Takes new groups while no job is outstanding. If it throws, nothing has changed.
  void rebind(const Lock&, std::vector<Group> groups);

  // Closing.

  // From now on check_open() throws.
  void close(const Lock&) noexcept;
  // Whether all jobs have ended, and all gates will open.
  bool has_nothing_left(const Lock&) const { return table_.all_ended() && !has_closed_gates(); }
  // Joins the threads and frees streams, events and memory. All jobs have ended.
  void stop(Lock& lock);

 private:
  // A channel, and its jobs that are not on the device yet.
  struct Queue {
    Queue(int number, Device& device) : channel(number, device) {}

    Channel channel;
    JobList jobs;             // cancelled jobs keep their place in the order
    size_t num_waiting = 0;   // of them that were not cancelled
    int64_t submitting = -1;  // number of the first job that a thread is submitting; -1 for none
    Transfers partially_submitted;  // one at most: its remainder is to be submitted
    std::thread worker;             // submits remainders and jobs; started when it is first needed
    std::condition_variable work;   // for the worker: there is something to submit, or to stop for

    // Whether all jobs up to this number were submitted, or have ended.
    bool is_past(int64_t id) const;
  };

  Queue& queue_of(const Job& job) { return queues_[job.channel]; }
  bool all_before_are_submitted(const Queue& queue, const Work& work) const;
  bool can_submit(const Queue& queue, const Job& job) const;
  bool can_submit_partially(const Job& job) const;
  void submit_or_queue(Lock& lock, const JobRef& job) noexcept;
  bool ensure_worker(Queue& queue, Job& job) noexcept;
  void run_worker(Queue& queue) noexcept;
  JobList take_jobs(Queue& queue) noexcept;
  bool can_join(Queue& queue, const JobList& jobs, size_t bytes, size_t entries, Job& next);

  void submit_jobs(Lock& lock, Queue& queue, JobList jobs, double seconds) noexcept;
  bool try_submit(Lock& lock, Queue& queue, JobList& jobs, double seconds) noexcept;
  std::vector<std::shared_ptr<Transfer>> transfers_before(const Queue& queue,
                                                          const JobList& jobs) const;
  Transfers make_transfer(Queue& queue, const JobList& jobs, double seconds);
  void submit_remainder(Lock& lock, Queue& queue) noexcept;
  bool end_attempt(Lock& lock, Queue& queue, Transfers made, Reason error, bool copying,
                   JobList& jobs) noexcept;
  void on_submitted(Queue& queue, Transfers made) noexcept;
  bool fail_unsubmitted(JobList& jobs, const Reason& error) noexcept;
  void end_unsubmitted(Job& job, State state, const Reason& error) noexcept;

  Queue* next_to_retire();
  bool sources_have_ended(const Transfer& transfer) const;
  void retire_first(Queue& queue);
  void open_gates(const Lock& lock) noexcept;
  bool has_closed_gates() const;
  void lose(const Reason& reason) noexcept;

  std::mutex mutex_;
  std::condition_variable
      progress_;  // a job was submitted or has ended, a gate is not busy any more

  Device& device_;
  const int64_t layers_;  // of the model, in all groups together
  const bool submit_thread_;
  std::vector<Group> groups_;
  JobTable table_;
  Queue queues_[kChannels];
  CopyPlanner planner_;
  GateWords gate_words_;
  std::vector<Gate*> gates_;  // that were made for jobs of this handler
  Reason lost_;
  int64_t flush_until_ =
      -1;  // jobs up to this number are submitted as soon as the driver takes them
  bool closed_ = false;
  bool stopping_ = false;
};

}  // namespace kvswap
