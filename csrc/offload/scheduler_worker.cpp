#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "cuda/context.h"
#include "offload/scheduler.h"

// The software queue: what is in it goes to the device in its order, small jobs joined.
namespace kvswap {
namespace {

// What is joined into one copy; more when somebody waits for all of it to be enqueued.
constexpr size_t kJoinedBytes = size_t{32} << 20, kJoinedEntries = 200;
constexpr size_t kJoinedJobs = 256, kFlushedJobs = 8192;

using Seconds = std::chrono::duration<double>;
constexpr Seconds kShortPause{50e-6}, kLongPause{1e-3};

}  // namespace

void Dispatcher::work(Channel& channel) noexcept {
  prctl(PR_SET_TIMERSLACK, 1);  // else a short pause is 50 us longer
  Lock lock(mutex);
  std::optional<cuda::ContextGuard> context;
  try {
    if (device >= 0) context.emplace(device);
  } catch (const std::exception& error) {
    lose(Reason(error));
  }
  Seconds pause = kShortPause;
  for (;;) {
    channel.work.wait(
        lock, [&] { return stopping_ || !channel.begun.empty() || !channel.queue.empty(); });
    if (!channel.begun.empty()) {
      go_on(lock, channel);
      continue;
    }
    if (channel.queue.empty()) return;
    advance();
    // The first must be one that will be enqueued: whether it may start is asked next.
    while (!channel.queue.empty() && channel.queue.front().ended()) channel.queue.pop_front();
    if (channel.queue.empty()) continue;
    if (can_start(channel, channel.queue.front())) {
      start(lock, channel, take(channel), kNoLimit);
      pause = kShortPause;
    } else {
      // Another thread may have to enqueue something first, or the device to end something.
      progress.wait_for(lock, pause);
      pause = std::min(2 * pause, kLongPause);
    }
  }
}

JobRow Dispatcher::take(Channel& channel) noexcept {
  JobRow jobs;
  size_t bytes = 0, entries = 0;
  channel.submitting = channel.queue.front().id;
  while (!channel.queue.empty()) {
    Job& next = channel.queue.front();
    if (next.ended()) {  // it was cancelled
      channel.queue.pop_front();
      continue;
    }
    if (!jobs.empty() && !joins(channel, jobs, bytes, entries, next)) break;
    bytes += next.nbytes;
    entries += next.work->entries;
    --channel.waiting;
    next.work->enqueuing = true;
    jobs.push_back(channel.queue.pop_front());
  }
  return jobs;
}

bool Dispatcher::joins(Channel& channel, const JobRow& jobs, size_t bytes, size_t entries,
                       Job& next) {
  const Job& first = jobs.front();
  Work& work = *next.work;
  const bool flushing = next.id <= flush_until_;
  if (jobs.size() >= (flushing ? kFlushedJobs : kJoinedJobs)) return false;
  if (!flushing && bytes + next.nbytes > kJoinedBytes) return false;
  if (!flushing && entries + work.entries > kJoinedEntries) return false;
  for (const Job* job : {&first, static_cast<const Job*>(&next)}) {
    if (job->layer_groups > 1 || job->work->gate != nullptr) return false;
  }
  if (work.background != first.work->background) return false;
  // Nothing may be written twice in one copy.
  if (work.behind[channel.number] >= first.id) return false;
  for (const auto& other : channels) {
    if (other.get() != &channel && !other->is_past(work.behind[other->number])) return false;
  }
  // What it starts behind may be behind the end of one of the others.
  if (work.after == nullptr) return true;
  if (!channel.is_over(*work.after)) return false;
  channel.give_moment(std::exchange(work.after, nullptr));
  return true;
}

void Dispatcher::flush(Lock& lock, const Job& job) noexcept {
  flush_until_ = std::max(flush_until_, job.id);
  while (!job.ended() && job.state != State::kRunning && help(lock, kNoLimit)) {
  }
  progress.notify_all();
  progress.wait(lock, [&] { return job.ended() || job.state == State::kRunning; });
}

}  // namespace kvswap
