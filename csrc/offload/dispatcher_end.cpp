#include <algorithm>

#include "../cuda_context.h"
#include "dispatcher.h"
#include "gate.h"

// How jobs end: because their copies have, because they are cancelled, or with the device.
namespace kvswap {

void Dispatcher::advance(int most) {
  const auto is_idle = [](const auto& channel) { return channel->running.empty(); };
  const bool idle = std::all_of(channels.begin(), channels.end(), is_idle) && unopened_.empty();
  if (!lost_.empty() || idle) return;
  try {
    const cuda::ContextGuard context(device);
    const auto opens = [](Gate* gate) { return gate->open(); };
    unopened_.erase(std::remove_if(unopened_.begin(), unopened_.end(), opens), unopened_.end());
    Channel* next;
    do {
      next = next_to_retire();
      if (next != nullptr) retire_first(*next);
    } while (next != nullptr && --most > 0);
  } catch (const std::exception& error) {
    lose(error.what());
  }
}

// Of the copies that have ended the one that was submitted first: a job ends after those that it
// waited for.
Channel* Dispatcher::next_to_retire() {
  Channel* next = nullptr;
  for (const auto& channel : channels) {
    if (channel->running.empty()) continue;
    Transfer& transfer = *channel->running.front();
    if (next != nullptr && transfer.first_id() > next->running.front()->first_id()) continue;
    if (channel->has_ended(transfer) && sources_have_ended(transfer)) next = channel.get();
  }
  return next;
}

bool Dispatcher::sources_have_ended(const Transfer& transfer) const {
  for (const JobRef& job : transfer.jobs) {
    for (const JobRef& source : job->sources) {
      if (!source->ended()) return false;
    }
  }
  return true;
}

void Dispatcher::retire_first(Channel& channel) {
  const std::shared_ptr<Transfer> transfer = channel.running.front();
  std::string error;
  double seconds = 0;
  try {
    seconds = channel.copy_seconds(*transfer);
    planner.note(*transfer, seconds);
  } catch (const std::exception& problem) {
    if (!channel.is_alive()) throw;
    error = problem.what();
  }
  for (const JobRef& job : transfer->jobs) {
    job->copy_seconds = seconds;
    const std::string reason = error.empty() ? ledger.failed_source(*job) : error;
    const State state = job->cancelled   ? State::kCancelled
                        : reason.empty() ? State::kDone
                                         : State::kFailed;
    ledger.finish(job, state, reason);
  }
  channel.retire(transfer);
  progress.notify_all();
}

void Dispatcher::lose(const std::string& reason) {
  lost_ = "the device is lost: " + reason + "; only a new process can use it again";
  for (const auto& channel : channels) {
    while (!channel->running.empty()) {
      const std::shared_ptr<Transfer> transfer = channel->running.front();
      for (const JobRef& job : transfer->jobs) {
        ledger.finish(job, job->cancelled ? State::kCancelled : State::kFailed, lost_);
      }
      channel->retire(transfer);
    }
    for (const JobRef& job : channel->queue) {
      if (!job->ended()) abandon(job, State::kFailed, lost_);
    }
    channel->queue.clear();
  }
  for (Gate* gate : unopened_) gate->let_through();
  unopened_.clear();
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
  hazards.rebind(groups);
  planner.rebind();
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
  lost_.empty() ? planner.close() : planner.leave();
}

}  // namespace kvswap
