#include <algorithm>

#include "cuda/context.h"
#include "offload/gate.h"
#include "offload/scheduler.h"

// How jobs end: because their copies have, because they are cancelled, or with the device.
namespace kvswap {

void Dispatcher::advance(int most) noexcept {
  const auto is_idle = [](const auto& channel) { return channel->running.empty(); };
  const bool idle = std::all_of(channels.begin(), channels.end(), is_idle) && !has_closed_gates();
  if (!lost_.empty() || idle) return;
  try {
    const cuda::ContextGuard context(device);
    open_gates();
    Channel* next;
    do {
      next = next_to_retire();
      if (next != nullptr) retire_first(*next);
    } while (next != nullptr && --most > 0);
  } catch (const std::bad_alloc&) {
    // No memory for the message of an error: whoever asks next gets that.
  } catch (const std::exception& error) {
    lose(Reason(error));
  }
}

// That the driver did not open when their loads failed.
void Dispatcher::open_gates() noexcept {
  for (Gate* gate : gates) {
    if (gate->problem().empty()) continue;
    if (gate->open()) progress.notify_all();
    if (!gate->problem().empty()) check_alive(gate->problem());
  }
}

bool Dispatcher::has_closed_gates() const {
  const auto is_closed = [](const Gate* gate) { return !gate->problem().empty(); };
  return std::any_of(gates.begin(), gates.end(), is_closed);
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
  for (const Job& job : transfer.jobs) {
    for (const JobRef& source : job.work->sources) {
      if (!source->ended()) return false;
    }
  }
  return true;
}

void Dispatcher::retire_first(Channel& channel) {
  const Transfer& transfer = *channel.running.front();
  Reason error;
  double seconds = 0;
  try {
    seconds = channel.copy_seconds(transfer);
    planner.note(transfer, seconds);
  } catch (const std::exception& problem) {
    if (!channel.is_alive()) throw;
    error = Reason(problem);
  }
  for (Job& job : transfer.jobs) {
    job.copy_seconds = seconds;
    const Reason reason = error.empty() ? ledger.failed_source(job) : error;
    const State state = job.work->cancelled ? State::kCancelled
                        : reason.empty()    ? State::kDone
                                            : State::kFailed;
    ledger.finish(job, state, reason);
  }
  channel.retire_first();
  progress.notify_all();
}

void Dispatcher::lose(const Reason& reason) noexcept {
  const auto text = [&] {
    return std::string("the device is lost: ") + reason.c_str() +
           "; only a new process can use it again";
  };
  lost_ = Reason(text, "the device is lost; only a new process can use it again");
  for (const auto& channel : channels) {
    while (!channel->running.empty()) {
      for (Job& job : channel->running.front()->jobs) {
        ledger.finish(job, job.work->cancelled ? State::kCancelled : State::kFailed, lost_);
      }
      channel->retire_first();
    }
    while (!channel->queue.empty()) {
      const JobRef job = channel->queue.pop_front();
      if (!job->ended()) abandon(*job, State::kFailed, lost_);
    }
  }
  for (Gate* gate : gates) {
    if (!gate->problem().empty()) gate->let_through();
  }
  progress.notify_all();
}

bool Dispatcher::cancel(Job& job) noexcept {
  advance();
  if (job.ended()) return false;
  job.work->cancelled = true;
  if (!job.work->enqueuing) abandon(job, State::kCancelled, {});
  return true;
}

void Dispatcher::check_alive(const Reason& error) noexcept {
  if (lost_.empty() && !channels.front()->is_alive()) lose(error);
}

void Dispatcher::rebind(std::vector<Group> of) {
  PathChooser chooser = planner.prepare(of);
  Hazards::Blocks blocks = hazards.make_blocks(of);
  // From here on nothing fails. The old tables go with `of`.
  groups.swap(of);
  planner.rebind(std::move(chooser));
  hazards.rebind(std::move(blocks));
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
