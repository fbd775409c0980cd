#pragma once

#include <condition_variable>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "offload/request.h"
#include "offload/scheduler.h"

namespace kvswap {

// Jobs that have not ended, and the first of them.
struct Unended {
  int64_t count, first_id;
  int first_channel;
};

// The native part of torch_kvswap.OffloadHandler, whose docstrings say what each call means. Checks
// requests, and waits for jobs; the scheduler does the rest. Any thread may call.
class Handler {
 public:
  // The context of the device is current.
  Handler(std::vector<Group> groups, int64_t layers, Device& device, bool submit_thread,
          const CopyMethodOptions& options);

  // Throws if the handler is closed or its device lost.
  // Without `wait`, only if no other thread has the lock; false otherwise.
  bool check_open(bool wait);
  // Throws, with no job and nothing in flight, when the request is wrong.
  JobRef submit(const Request& request);

  // Appends the first jobs that have ended and were not reported, at most `most`, which are
  // reported from now on. Asks the device. Returns whether more have ended.
  bool report(size_t most, EndedJobs& to) noexcept;
  // Asks the device which jobs have ended, and tells the manager, without a poll().
  void end_reservations() noexcept;
  // The jobs that failed or were cancelled and were not reported.
  std::vector<JobRef> unreported_failures();
  // The jobs that have not ended and read or write one of these GPU blocks, in order of submission.
  // Asks the device.
  std::vector<JobRef> jobs_using(const BlockLists& blocks);
  // The caller has written these pages: loads of them do not fail for an earlier store. Throws,
  // with nothing changed, if there is no such page, or a store that has not ended writes it.
  void mark_written(const PageLists& pages, bool is_grouped);
  // Whether the job is known to have ended; does not ask the device. Then it never changes again.
  bool is_over(const Job& job);
  // What is known of the state of a job, and whether cancel() was called for it.
  std::pair<State, bool> state_of(const Job& job);

  // Waits on the host until the jobs have ended. for_all: until all jobs submitted so far have
  // ended; `jobs` is not used. Returns 0 after `seconds`, with the jobs that have not ended in
  // `unended`, 2 if a job failed or was cancelled (for_all: and was not reported), otherwise 1.
  int synchronize(const std::vector<Job*>& jobs, bool for_all, double seconds, Unended& unended);
  // Waits on the host until a job that was not reported has ended, or all jobs have. False after
  // `seconds`.
  bool wait_for_ended(double seconds);
  // Makes a stream wait for a layer group of the job; -1: for all of it.
  void wait(Job* job, int layer_group, const StreamRef& stream);
  // Whether the job has ended. Asks the device.
  bool has_ended(const Job* job);
  // True when the job will be reported as cancelled.
  bool cancel(Job* job);
  // If it throws, nothing has changed.
  void rebind(std::vector<Group> groups);
  // See CopyPlanner. No job was submitted yet.
  bool join_exchange(const std::shared_ptr<Exchange>& exchange, uint64_t pools, double seconds) {
    return scheduler_.join_exchange(scheduler_.lock(), exchange, pools, seconds);
  }
  ChannelMetrics metrics(int channel);
  // Refuses further jobs, and waits until all have ended. False if that takes longer than
  // `seconds`; to be called again then.
  bool close(double seconds);

  // A ContextGuard of the caller has failed with this error. If the device is lost, ends all jobs.
  void on_context_error(const Reason& error);

  // Why some copies are slower than they could be, and how they are made, or "". Never changes.
  const std::string& slower_copies() const { return scheduler_.slower_copies(); }

  Device& device() const { return scheduler_.device(); }

 private:
  // Calls the driver. Throws what the call does, unless the device is lost.
  template <typename Call>
  void ask_device(const Lock& lock, const Call& call);
  void refuse_capture(const StreamRef& stream, const char* noun) const;
  void refuse_captures(const Request& request) const;
  // Waits for the end of the job, for about a millisecond at most; submits it if it is queued and
  // that takes less than `seconds`. began: when the waiting began.
  void wait_for_end(Lock& lock, const Job& job, double seconds, double began);
  // Polls for the end of a transfer, without the lock so that other threads can submit meanwhile.
  // Returns within about a millisecond. transfer: null if the job is not on the device yet; then it
  // waits for the scheduler's progress instead.
  void poll_end(Lock& lock, std::shared_ptr<Transfer> transfer, double began);

  Scheduler scheduler_;
  // Guarded by the scheduler's lock.
  RequestReader reader_;
  int polling_ = 0;                          // threads that use an event without the lock
  bool stopping_ = false, stopped_ = false;  // the scheduler's threads are about to end, have ended
  std::condition_variable closing_;          // polling_ is 0, or stopped_
};

}  // namespace kvswap
