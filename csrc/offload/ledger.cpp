#include "ledger.h"

#include <algorithm>

namespace kvswap {
namespace {

std::string reason(const Job& source) {
  if (source.state == State::kCancelled) return source.name() + " was cancelled";
  return source.name() + " failed: " + *source.error;
}

bool spoils(const Job& source) {
  return source.state == State::kFailed || source.state == State::kCancelled;
}

}  // namespace

const JobRef* Ledger::open_job(int64_t id) const {
  if (id < first_open_ || id - first_open_ >= static_cast<int64_t>(open_.size())) return nullptr;
  const std::optional<JobRef>& entry = open_[id - first_open_];
  return entry ? &*entry : nullptr;
}

std::string Ledger::enter(const JobRef& job) {
  std::string doomed;
  const bool is_store = job->channel == kStores;
  int64_t last = -1;
  std::vector<int64_t> sources;
  for (size_t i = 0; i < job->count() && doomed.empty(); ++i) {
    if (!is_store && !invalid_.empty()) {
      const auto found = invalid_.find(hazards_.slot_key(*job, i));
      if (found != invalid_.end()) doomed = found->second;
    }
    const int64_t source =
        is_store ? hazards_.latest_load(*job, i) : hazards_.latest_store(*job, i);
    if (source == last || source < 0) continue;
    last = source;
    if (open_job(source) != nullptr) sources.push_back(source);
    if (!is_store || failed_loads_.empty()) continue;
    const auto failed = failed_loads_.find(source);
    if (failed != failed_loads_.end()) doomed = reason(*failed->second);
  }
  // Each once; a load of many blocks may have as many sources.
  std::sort(sources.begin(), sources.end());
  sources.erase(std::unique(sources.begin(), sources.end()), sources.end());
  for (const int64_t source : sources) job->sources.push_back(*open_job(source));
  if (is_store && !invalid_.empty()) {
    for (size_t i = 0; i < job->count(); ++i) invalid_.erase(hazards_.slot_key(*job, i));
  }
  if (open_.empty()) first_open_ = job->id;
  open_.emplace_back(job);
  ++metrics_[job->channel].submitted;
  return doomed;
}

std::string Ledger::failed_source(const Job& job) const {
  for (const JobRef& source : job.sources) {
    if (spoils(*source)) return reason(*source);
  }
  return "";
}

void Ledger::finish(const JobRef& job, State state, const std::string& error) {
  job->state = state;
  if (state == State::kFailed) job->error = std::make_unique<std::string>(error);
  failures_ += spoils(*job);
  ChannelMetrics& metrics = metrics_[job->channel];
  if (state == State::kDone) {
    ++metrics.done;
    metrics.bytes += job->nbytes;
    ++metrics.jobs_by_path[job->path];
    observe(metrics.queue, job->queue_seconds);
    observe(metrics.copy, job->copy_seconds);
  } else {
    ++(state == State::kFailed ? metrics.failed : metrics.cancelled);
    if (job->channel == kStores) invalidate_slots(*job, reason(*job));
    if (job->channel != kStores) failed_loads_.emplace(job->id, job);
  }
  job->transfer.reset();
  std::vector<JobRef>().swap(job->sources);
  std::vector<int64_t>().swap(job->ids);
  ended_.push_back(job);
  open_[job->id - first_open_].reset();
  while (!open_.empty() && !open_.front()) {
    open_.pop_front();
    ++first_open_;
  }
}

JobRef Ledger::report() {
  JobRef job = ended_.front();
  ended_.pop_front();
  failures_ -= spoils(*job);
  failed_loads_.erase(job->id);
  return job;
}

// Only where no later store will write, or has written, the slot.
void Ledger::invalidate_slots(const Job& job, const std::string& why) {
  for (size_t i = 0; i < job.count(); ++i) {
    if (hazards_.latest_store(job, i) == job.id) invalid_[hazards_.slot_key(job, i)] = why;
  }
}

}  // namespace kvswap
