#pragma once

#include <condition_variable>
#include <limits>
#include <memory>
#include <mutex>
#include <vector>

#include "offload/channel.h"
#include "offload/copy_plan.h"
#include "offload/group.h"
#include "offload/hazards.h"
#include "offload/job_table.h"

namespace kvswap {

using Lock = std::unique_lock<std::mutex>;

constexpr double kNoLimit = std::numeric_limits<double>::infinity();  // in seconds

// Brings jobs onto the device, each channel's in order and not too many at a time, and sees them
// end. Whoever submits a job enqueues it on the spot where that takes microseconds, and of a larger
// one the beginning. The rest is for a worker thread of the channel, or for a thread that waits for
// whatever job. What must wait in software is for the worker, which joins small jobs into one copy;
// so is everything, but for copies between host memory, where submissions are `threaded`.
//
// Every function is called with the lock held. Those that take it let it go while the driver
// enqueues a copy, which can take long. Once a job is in the ledger nothing throws: what fails, for
// want of memory too, ends that job.
class Dispatcher {
 public:
  Dispatcher(std::vector<Group> groups, int64_t layers, int device, bool threaded,
             const kvswap_path_options& options);
  ~Dispatcher();

  std::mutex mutex;
  std::condition_variable progress;  // a job was enqueued or has ended, a gate is not busy any more

  const int device;
  std::vector<Group> groups;
  Hazards hazards;
  Ledger ledger;
  std::vector<std::unique_ptr<Channel>> channels;
  Planner planner;
  std::vector<Gate*> gates;  // that were made for jobs of this handler

  // The error after which the device runs nothing any more, or none.
  const Reason& lost() const { return lost_; }

  // Enqueues a job that is in the ledger, or queues it.
  void dispatch(Lock& lock, const JobRef& job) noexcept;

  // Ends the jobs whose copies have ended on the device: those of so many copies at most.
  void advance(int most = std::numeric_limits<int>::max()) noexcept;

  // Waits until a job has been enqueued, or has ended. What is ahead of it is not held back any
  // more, so that this waits for the device only when the driver has no room left.
  void flush(Lock& lock, const Job& job) noexcept;

  // Enqueues the rest of a job that was begun, if there is one that its channel's worker, which may
  // take long to wake up, has not taken yet. For those who wait: only what takes `seconds` at most,
  // and what the driver has room for. No context need be current.
  bool help(Lock& lock, double seconds) noexcept;

  // True when the job will be reported as cancelled.
  bool cancel(Job& job) noexcept;

  // Ends a job that was never enqueued.
  void abandon(Job& job, State state, const Reason& error) noexcept;

  // Whether all jobs have ended, and all gates will open.
  bool has_nothing_left() const {
    return ledger.all_ended_until(ledger.last_id()) && !has_closed_gates();
  }

  // Takes new groups while no job is outstanding. If it throws, nothing has changed.
  void rebind(std::vector<Group> groups);

  // Ends every job as failed, and remembers why, when the device does not answer any more.
  void check_alive(const Reason& error) noexcept;

  // Lets threads, streams and events go. All jobs have ended.
  void stop(Lock& lock);

 private:
  Channel& channel_of(const Job& job) { return *channels[job.channel]; }
  bool can_start(const Channel& channel, const Job& job) const;
  bool joins(Channel& channel, const JobRow& jobs, size_t bytes, size_t entries, Job& next);
  JobRow take(Channel& channel) noexcept;
  void start(Lock& lock, Channel& channel, JobRow jobs, double seconds) noexcept;
  bool attempt(Lock& lock, Channel& channel, JobRow& jobs, double seconds) noexcept;
  std::vector<std::shared_ptr<Transfer>> transfers_before(const Channel& channel,
                                                          const JobRow& jobs) const;
  Transfers make_transfer(Channel& channel, const JobRow& jobs, double seconds);
  bool end_attempt(Lock& lock, Channel& channel, Transfers made, Reason error, bool copying,
                   double seconds, JobRow& jobs) noexcept;
  bool give_up(JobRow& jobs, const Reason& error) noexcept;
  void go_on(Lock& lock, Channel& channel) noexcept;
  bool has_worker(Channel& channel, Job& job) noexcept;
  bool can_be_divided(const Job& job) const;
  void settle(Channel& channel, Transfers made, double seconds) noexcept;
  Channel* next_to_retire();
  bool sources_have_ended(const Transfer& transfer) const;
  void retire_first(Channel& channel);
  void open_gates() noexcept;
  bool has_closed_gates() const;
  void lose(const Reason& reason) noexcept;
  void work(Channel& channel) noexcept;

  const int64_t layers_;
  const bool threaded_;
  Reason lost_;
  int64_t flush_until_ = -1;
  bool stopping_ = false;
};

}  // namespace kvswap
