#pragma once

#include <deque>
#include <vector>

#include "offload/hazards.h"
#include "offload/job.h"
#include "offload/metrics.h"

namespace kvswap {

// Which jobs there are, how each has ended, and which slots hold nothing that may be loaded.
//
// A job that reads what another one was to write fails when that one failed or was cancelled. A
// slot stays invalid until it is stored again; a GPU block only until the failed load was reported,
// because from then on the caller knows, and may write it by other means.
//
// Only prepare() allocates: what happens to a job afterwards cannot fail for want of memory.
//
// Not thread safe: the handler has a lock.
class Ledger {
 public:
  explicit Ledger(const Hazards& hazards) : hazards_(hazards), invalid_(hazards.num_slots()) {}

  // Makes ready for a new job, before Hazards::note: room for it, and its sources. Returns the
  // reason why it cannot succeed, or none. Whether it throws or not, no job is there yet.
  Reason prepare(Job& job);

  // Enters the job that was prepared last, and numbers it.
  void enter(const JobRef& job) noexcept;

  // The number of the job that was entered last; -1 before the first.
  int64_t last_id() const { return next_id_ - 1; }

  // Why a job cannot succeed although nothing is wrong with itself: a source that has failed or was
  // cancelled; or none.
  Reason failed_source(const Job& job) const noexcept;

  // Ends a job, once. error: why it failed.
  void finish(Job& job, State state, const Reason& error) noexcept;

  // The jobs that have ended and were not reported, in the order in which they ended.
  const EndedJobs& ended() const { return ended_; }

  // Whether one of them is not done.
  bool has_failures() const { return failures_ > 0; }

  // Takes the first of them: it has been reported.
  JobRef report() noexcept;

  // Whether all jobs up to this number have ended.
  bool all_ended_until(int64_t id) const { return first_open_ > id; }

  // The first job that has not ended. There is one.
  const Job& oldest() const { return *jobs_[first_open_ - first_id_]; }

  ChannelMetrics& metrics(int channel) { return metrics_[channel]; }

 private:
  // The job of that number; null when it was reported.
  Job* find(int64_t id) const;
  void invalidate_slots(Job& job) noexcept;
  void make_valid(const Job& store) noexcept;

  const Hazards& hazards_;
  // From the oldest that was not reported on, by number; none where one was. May have room for one
  // more than there are.
  std::deque<JobRef> jobs_;
  int64_t first_id_ = 0;    // of them
  int64_t first_open_ = 0;  // the first that has not ended
  int64_t next_id_ = 0;
  EndedJobs ended_;
  size_t failures_ = 0;          // among them
  std::vector<JobRef> invalid_;  // by slot key: the store that was to fill it, or none
  size_t invalid_count_ = 0;
  ChannelMetrics metrics_[kChannels] = {};
};

}  // namespace kvswap
