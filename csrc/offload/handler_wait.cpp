#include <algorithm>
#include <chrono>

#include "cuda/context.h"
#include "offload/clock.h"
#include "offload/handler.h"

// How a thread waits on the host for jobs to end.
namespace kvswap {
namespace {

// So long, in seconds, it looks for one end without the lock. Then others may have ended, too, and
// make room for what is queued.
constexpr double kLook = 50e-6;

}  // namespace

int Handler::wait(const std::vector<Job*>& jobs, bool for_all, double seconds) {
  const double began = now();
  size_t ended = 0;
  bool failed = false;
  Lock lock(dispatcher_.mutex);
  for (const int64_t last = dispatcher_.ledger.last_id();;) {
    dispatcher_.advance();
    for (; ended < jobs.size() && jobs[ended]->ended(); ++ended) {
      failed |= jobs[ended]->state != State::kDone;
    }
    if (for_all ? dispatcher_.ledger.all_ended_until(last) : ended == jobs.size()) {
      return failed || (for_all && dispatcher_.ledger.has_failures()) ? 2 : 1;
    }
    const double left = seconds - (now() - began);
    if (left <= 0) return 0;
    const Job& next = for_all ? dispatcher_.ledger.oldest() : *jobs[ended];
    if (dispatcher_.help(lock, left)) continue;
    look_for_end(lock, next.work->transfer, began);
  }
}

void Handler::look_for_end(Lock& lock, std::shared_ptr<Transfer> transfer, double began) {
  if (!transfer) {  // queued, or about to be enqueued by another thread
    const double pause = std::clamp((now() - began) / 100, kLook, 1e-3);
    dispatcher_.progress.wait_for(lock, std::chrono::duration<double>(pause));
    return;
  }
  ++looking_;
  lock.unlock();
  cuda::Result state = cuda::kNotReady;
  try {
    const cuda::ContextGuard context(device());
    const double until = now() + kLook;
    do {
      pause_since(began);
      state = cuda::driver().query_event(transfer->ends.back());
    } while (state == cuda::kNotReady && now() < until);
  } catch (const std::exception&) {  // whoever asks next with the lock finds the device lost, too
  }
  lock.lock();
  transfer->end_seen |= state == cuda::kSuccess;
  transfer.reset();
  if (--looking_ == 0 && closed_) dispatcher_.progress.notify_all();
}

}  // namespace kvswap
