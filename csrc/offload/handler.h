#pragma once

#include <memory>
#include <vector>

#include "../capi.h"
#include "dispatcher.h"
#include "gate.h"
#include "request.h"

namespace kvswap {

// What a server holds, without its memory: torch_kvswap.OffloadHandler says what each call means.
// Any thread may call.
class Handler {
 public:
  // The context of the device is current.
  Handler(std::vector<Group> groups, int64_t layers, int device, bool threaded,
          const kvswap_path_options& options);
  ~Handler();

  JobRef submit(const kvswap_request& request);
  // Reads the jobs that have ended and were not reported, which they are now: so many at most.
  template <typename Read>
  void report(size_t most, const Read& read) {
    const Lock lock(dispatcher_.mutex);
    dispatcher_.advance();
    for (; most > 0 && !dispatcher_.ledger.ended().empty(); --most) {
      read(dispatcher_.ledger.report());
    }
  }

  // Reads those of them that are not done, and that stay unreported.
  template <typename Read>
  void look_at_failures(size_t most, const Read& read) {
    const Lock lock(dispatcher_.mutex);
    for (const JobRef& job : dispatcher_.ledger.ended()) {
      if (most == 0) break;
      if (job->state == State::kDone) continue;
      read(job);
      --most;
    }
  }

  int wait(const std::vector<Job*>& jobs, bool for_all, double seconds);
  bool cancel(Job* job);
  void wait_on(Job* job, int layer_group, const cuda::StreamRef& stream);
  // Reads what has become of the job, without asking the device.
  template <typename Read>
  auto look(const Job* job, const Read& read) {
    const Lock lock(dispatcher_.mutex);
    return read(*job);
  }
  // Asks the device.
  bool has_ended(const Job* job);
  void rebind(std::vector<Group> groups);
  Gate* make_gate(int parts);
  kvswap_metrics metrics(int channel);
  void close();

  // The device did not take the caller's context: it is lost.
  void lose(const std::string& error);

  // Why paths that would be chosen cannot be had, or "". Stays.
  const std::string& path_problem() const { return dispatcher_.planner.problem(); }

  // -1 where all is host memory.
  int device() const { return dispatcher_.device; }

 private:
  void check_open() const;
  Moment* moment(Channel& channel, const kvswap_request& request);
  // Whose work is to come first.
  cuda::StreamRef stream_of(const kvswap_request& request) const;
  // Looks for the end of what a thread waits for without the lock, so that nobody who submits
  // meanwhile is held up by it, and returns soon in any case. null: the job is not enqueued yet.
  void look_for_end(Lock& lock, std::shared_ptr<Transfer> transfer, double began);
  void close_gate(Lock& lock, const kvswap_request& request);

  Dispatcher dispatcher_;
  RequestReader reader_;
  GateWords gate_words_;
  std::vector<Gate*> gates_;  // that a caller has, or that are busy
  int64_t last_id_ = -1;
  int looking_ = 0;                          // threads that use an event without the lock
  bool closed_ = false;                      // takes no more jobs
  bool stopping_ = false, stopped_ = false;  // is about to have no threads, has none
};

}  // namespace kvswap
