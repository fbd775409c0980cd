#include "offload/job_table.h"

#include <algorithm>

namespace kvswap {
namespace {

Reason reason(const Job& source) noexcept {
  const auto text = [&] {
    if (source.state == State::kCancelled) return source.name() + " was cancelled";
    return source.name() + " failed: " + source.error.c_str();
  };
  return Reason(text, "a job that writes what this one reads has failed; out of host memory");
}

bool spoils(const Job& source) {
  return source.state == State::kFailed || source.state == State::kCancelled;
}

}  // namespace

Job* Ledger::find(int64_t id) const {
  return id < first_id_ || id >= next_id_ ? nullptr : jobs_[id - first_id_].get();
}

Reason Ledger::prepare(Job& job) {
  Reason doomed;
  Work& work = *job.work;
  const bool is_store = job.channel == kStores;
  int64_t last = -1;
  std::vector<int64_t> sources;
  for (size_t i = 0; i < work.count() && doomed.empty(); ++i) {
    if (!is_store && invalid_count_ > 0) {
      const JobRef& failed = invalid_[hazards_.slot_key(work, i)];
      if (failed) doomed = reason(*failed);
    }
    const int64_t number =
        is_store ? hazards_.latest_load(work, i) : hazards_.latest_store(work, i);
    if (number == last || number < 0) continue;
    last = number;
    const Job* source = find(number);
    if (source == nullptr) continue;
    if (!source->ended()) sources.push_back(number);
    if (is_store && spoils(*source)) doomed = reason(*source);
  }
  // Each once; a load of many blocks may have as many sources.
  std::sort(sources.begin(), sources.end());
  sources.erase(std::unique(sources.begin(), sources.end()), sources.end());
  for (const int64_t number : sources) work.sources.emplace_back(find(number));
  while (first_id_ + static_cast<int64_t>(jobs_.size()) <= next_id_) jobs_.emplace_back();
  return doomed;
}

void Ledger::enter(const JobRef& job) noexcept {
  job->id = next_id_++;
  jobs_[job->id - first_id_] = job;
  if (job->channel == kStores && invalid_count_ > 0) make_valid(*job);
  ++metrics_[job->channel].submitted;
}

Reason Ledger::failed_source(const Job& job) const noexcept {
  for (const JobRef& source : job.work->sources) {
    if (spoils(*source)) return reason(*source);
  }
  return {};
}

void Ledger::finish(Job& job, State state, const Reason& error) noexcept {
  job.state = state;
  if (state == State::kFailed) job.error = error;
  failures_ += spoils(job);
  ChannelMetrics& metrics = metrics_[job.channel];
  if (state == State::kDone) {
    ++metrics.done;
    metrics.bytes += job.nbytes;
    ++metrics.jobs_by_path[job.path];
    observe(metrics.queue, job.queue_seconds);
    observe(metrics.copy, job.copy_seconds);
  } else {
    ++(state == State::kFailed ? metrics.failed : metrics.cancelled);
    if (job.channel == kStores) invalidate_slots(job);
  }
  job.work.reset();
  ended_.push_back(JobRef(&job));
  while (first_open_ < next_id_) {
    const Job* first = find(first_open_);
    if (first != nullptr && !first->ended()) break;
    ++first_open_;
  }
}

JobRef Ledger::report() noexcept {
  JobRef job = ended_.pop_front();
  failures_ -= spoils(*job);
  jobs_[job->id - first_id_] = JobRef();
  while (first_id_ < next_id_ && !jobs_.front()) {
    jobs_.pop_front();
    ++first_id_;
  }
  return job;
}

// Only where no later store will write, or has written, the slot.
void Ledger::invalidate_slots(Job& job) noexcept {
  for (size_t i = 0; i < job.work->count(); ++i) {
    if (hazards_.latest_store(*job.work, i) != job.id) continue;
    JobRef& store = invalid_[hazards_.slot_key(*job.work, i)];
    invalid_count_ += !store;
    store = JobRef(&job);
  }
}

// From now on the slots hold what this store writes.
void Ledger::make_valid(const Job& store) noexcept {
  for (size_t i = 0; i < store.work->count(); ++i) {
    JobRef& failed = invalid_[hazards_.slot_key(*store.work, i)];
    invalid_count_ -= static_cast<bool>(failed);
    failed = JobRef();
  }
}

}  // namespace kvswap
