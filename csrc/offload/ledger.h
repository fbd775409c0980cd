#pragma once

#include <deque>
#include <optional>
#include <string>
#include <unordered_map>

#include "hazards.h"
#include "job.h"
#include "metrics.h"

namespace kvswap {

// Which jobs there are, how each has ended, and which slots hold nothing that may be loaded.
//
// A job that reads what another one was to write fails when that one failed or was cancelled. A
// slot stays invalid until it is stored again; a GPU block only until the failed load was reported,
// because from then on the caller knows, and may write it by other means.
//
// Not thread safe: the handler has a lock.
class Ledger {
 public:
  explicit Ledger(const Hazards& hazards) : hazards_(hazards) {}

  // Enters a new job, before Hazards::note. Sets its sources; gives the reason why it cannot
  // succeed, or "".
  std::string enter(const JobRef& job);

  // Why a job cannot succeed although nothing is wrong with itself: a source that has failed or was
  // cancelled; or "".
  std::string failed_source(const Job& job) const;

  // Ends a job, once. `error`: why it failed.
  void finish(const JobRef& job, State state, const std::string& error);

  // The jobs that have ended and were not reported, in the order in which they ended.
  const std::deque<JobRef>& ended() const { return ended_; }

  // Whether one of them is not done.
  bool has_failures() const { return failures_ > 0; }

  // Takes the first of them: it has been reported.
  JobRef report();

  // Whether all jobs up to this number have ended.
  bool all_ended_until(int64_t id) const { return first_open_ > id; }

  // The first job that has not ended. There is one.
  const Job& oldest() const { return **open_.front(); }

  ChannelMetrics& metrics(int channel) { return metrics_[channel]; }

 private:
  // The job of that number while it has not ended; else null.
  const JobRef* open_job(int64_t id) const;
  void invalidate_slots(const Job& job, const std::string& reason);

  const Hazards& hazards_;
  // The jobs from the oldest that has not ended on, by number; empty where one has.
  std::deque<std::optional<JobRef>> open_;
  int64_t first_open_ = 0;
  std::deque<JobRef> ended_;
  size_t failures_ = 0;                               // among them
  std::unordered_map<int64_t, JobRef> failed_loads_;  // not reported yet, by number
  std::unordered_map<int64_t, std::string> invalid_;  // why, by slot key
  ChannelMetrics metrics_[kChannels] = {};
};

}  // namespace kvswap
