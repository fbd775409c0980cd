#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace kvswap {

enum ChannelNumber : int { kStores = 0, kLoads = 1, kExpedited = 2, kChannels = 3 };

inline const char* direction_name(int channel) { return channel == kStores ? "store" : "load"; }

// Python knows these numbers.
enum class State : int { kQueued = 0, kRunning = 1, kDone = 2, kFailed = 3, kCancelled = 4 };

struct Transfer;
class Gate;
struct Moment;
class JobRef;

// What a job copies in one group: `count` blocks, whose ids follow those of the parts before it.
struct Part {
  int group;
  size_t count;
};

// A store or a load, from its submission until nobody asks for it any more. All but the number of
// references is guarded by the handler's lock.
struct Job {
  int64_t id = 0;
  int channel = 0;
  int layer_groups = 1;
  State state = State::kQueued;
  int path = 0;               // kvswap::Path
  uint32_t entries = 0;       // of the driver's queue, when it is copied alone
  float enqueue_seconds = 0;  // of the thread that does it
  bool queued = false;        // ever, in software
  bool enqueuing = false;     // or enqueued
  bool cancelled = false;     // after that
  bool background = false;    // copies without kernels
  uint64_t nbytes = 0;
  std::vector<Part> parts;
  std::vector<int64_t> ids;  // all GPU blocks, then the slot of a host page for each
  Moment* after = nullptr;   // what it starts behind; null: nothing
  Gate* gate = nullptr;      // that was closed for it

  // By data: the number, in each channel, of the latest job that must not overlap with this one;
  // -1 for none.
  int64_t behind[kChannels] = {-1, -1, -1};
  std::vector<JobRef> sources;  // the jobs that write what this one reads

  std::shared_ptr<Transfer> transfer;  // while it runs
  double submitted_at = 0.0;
  double submit_seconds = 0.0, queue_seconds = 0.0, copy_seconds = 0.0;
  std::unique_ptr<std::string> error;
  std::atomic<int> references{0};

  size_t count() const { return ids.size() / 2; }
  const int64_t* blocks() const { return ids.data(); }
  const int64_t* slots() const { return ids.data() + count(); }
  bool ended() const { return state >= State::kDone; }
  // "store 17".
  std::string name() const { return direction_name(channel) + (" " + std::to_string(id)); }
};

// A counted reference: a job has many holders (the queue, those who wait for it, Python), and a
// queue of many small jobs wants them small.
class JobRef {
 public:
  explicit JobRef(Job* job) : job_(job) { job_->references.fetch_add(1); }
  JobRef(const JobRef& other) : JobRef(other.job_) {}
  JobRef(JobRef&& other) noexcept : job_(std::exchange(other.job_, nullptr)) {}
  JobRef& operator=(JobRef other) noexcept {
    std::swap(job_, other.job_);
    return *this;
  }
  ~JobRef() {
    if (job_ != nullptr) release(job_);
  }

  static void release(Job* job) {
    if (job->references.fetch_sub(1) == 1) delete job;
  }

  Job* operator->() const { return job_; }
  Job& operator*() const { return *job_; }
  Job* get() const { return job_; }

 private:
  Job* job_;
};

}  // namespace kvswap
