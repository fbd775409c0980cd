#pragma once

#include <memory>
#include <vector>

#include "capi.h"
#include "offload/gate.h"
#include "offload/request.h"
#include "offload/scheduler.h"

namespace kvswap {

// What a server holds, without its memory: torch_kvswap.OffloadHandler says what each call means.
// Any thread may call.
class Handler {
 public:
  // The context of the device is current.
  Handler(std::vector<Group> groups, int64_t layers, int device, bool threaded,
          const kvswap_path_options& options);
  ~Handler();

  // If it throws there is no job, and nothing is in flight.
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
    for (Job& job : dispatcher_.ledger.ended()) {
      if (most == 0) break;
      if (job.state == State::kDone) continue;
      read(JobRef(&job));
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
  // If it throws, nothing has changed.
  void rebind(std::vector<Group> groups);
  Gate* make_gate(int parts);
  kvswap_metrics metrics(int channel);
  // Whether it has been done within so many seconds; to be called again where not.
  bool close(double seconds);

  // The device did not take the caller's context: it is lost.
  void lose(const Reason& error);

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
  void refuse_captures(const kvswap_request& request) const;
  // Until no load before it keeps the gate.
  void wait_for_gate(Lock& lock, const Gate& gate);
  Reason take_moment(Job& job, const kvswap_request& request);
  void close_gate(Job& job, Gate& gate);

  Dispatcher dispatcher_;
  RequestReader reader_;
  GateWords gate_words_;
  int looking_ = 0;                          // threads that use an event without the lock
  bool closed_ = false;                      // takes no more jobs
  bool stopping_ = false, stopped_ = false;  // is about to have no threads, has none
};

}  // namespace kvswap
