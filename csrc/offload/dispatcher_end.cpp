#include <algorithm>

#include "../cuda_context.h"
#include "dispatcher.h"

// How jobs end: because their copies have, because they are cancelled, or with the device.
namespace kvswap {

void Dispatcher::advance(int most) {
  const auto is_idle = [](const auto& channel) { return channel->running.empty(); };
  if (!lost_.empty() || std::all_of(channels.begin(), channels.end(), is_idle)) return;
  try {
    const cuda::ContextGuard context(device);
    // Again, because a job that reads what one of a later channel wrote ends after it.
    for (bool again = true; again;) {
      again = false;
      for (const auto& channel : channels) {
        while (most > 0 && retire_next(*channel)) {
          --most;
          again = true;
        }
      }
    }
  } catch (const std::exception& error) {
    lose(error.what());
  }
}

bool Dispatcher::retire_next(Channel& channel) {
  if (channel.running.empty()) return false;
  const std::shared_ptr<Transfer> transfer = channel.running.front();
  if (!channel.has_ended(*transfer)) return false;
  for (const JobRef& job : transfer->jobs) {
    for (const JobRef& source : job->sources) {
      if (!source->ended()) return false;
    }
  }
  const double seconds = channel.copy_seconds(*transfer);
  for (const JobRef& job : transfer->jobs) {
    job->copy_seconds = seconds;
    const std::string reason = ledger.failed_source(*job);
    const State state = job->cancelled   ? State::kCancelled
                        : reason.empty() ? State::kDone
                                         : State::kFailed;
    ledger.finish(job, state, reason);
  }
  channel.retire(transfer);
  progress.notify_all();
  return true;
}

void Dispatcher::lose(const std::string& reason) {
  lost_ = "the device is lost: " + reason + "; only a new process can use it again";
  for (const auto& channel : channels) {
    for (const auto& transfer : channel->running) {
      for (const JobRef& job : transfer->jobs) ledger.finish(job, State::kFailed, lost_);
    }
    channel->running.clear();
    for (const JobRef& job : channel->queue) {
      if (!job->ended()) abandon(job, State::kFailed, lost_);
    }
    channel->queue.clear();
  }
  progress.notify_all();
}

bool Dispatcher::cancel(const JobRef& job) {
  advance();
  if (job->ended()) return false;
  job->cancelled = true;
  if (!job->enqueuing) abandon(job, State::kCancelled, "");
  return true;
}

void Dispatcher::check_alive(const std::string& error) {
  if (lost_.empty() && !channels.front()->is_alive()) lose(error);
}

void Dispatcher::rebind(std::vector<Group> of) {
  groups = std::move(of);
  hazards = Hazards(groups);
  plans_ = make_plans();
}

void Dispatcher::stop(Lock& lock) {
  stopping_ = true;
  for (const auto& channel : channels) channel->work.notify_all();
  lock.unlock();
  for (const auto& channel : channels) {
    if (channel->worker.joinable()) channel->worker.join();
  }
  lock.lock();
  for (const auto& channel : channels) channel->close();
}

}  // namespace kvswap
