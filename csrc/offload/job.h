#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "copy/copy_method.h"
#include "offload/reason.h"
#include "prefix/reserved_pages.h"

namespace kvswap {

enum ChannelNumber : int { kStores = 0, kLoads = 1, kExpedited = 2, kChannels = 3 };

inline const char* direction_name(int channel) { return channel == kStores ? "store" : "load"; }

enum class State : uint8_t { kQueued = 0, kRunning = 1, kDone = 2, kFailed = 3, kCancelled = 4 };

struct Transfer;
struct StreamPoint;
struct Job;

// A counted reference to a job, held by the queue, by threads that wait for the job, and by Python.
// Smaller than a shared_ptr, because a queue may hold many jobs.
class JobRef {
 public:
  JobRef() = default;  // null
  explicit JobRef(Job* job);
  JobRef(const JobRef& other) : JobRef(other.job_) {}
  JobRef(JobRef&& other) noexcept : job_(std::exchange(other.job_, nullptr)) {}
  JobRef& operator=(JobRef other) noexcept {
    std::swap(job_, other.job_);
    return *this;
  }
  ~JobRef() {
    if (job_ != nullptr) release(job_);
  }

  // Takes over a reference that the caller has.
  static JobRef adopt(Job* job) {
    JobRef adopted;
    adopted.job_ = job;
    return adopted;
  }
  static void release(Job* job);

  explicit operator bool() const { return job_ != nullptr; }
  Job* operator->() const { return job_; }
  Job& operator*() const { return *job_; }
  Job* get() const { return job_; }

 private:
  Job* job_ = nullptr;
};

// A job that writes what another one reads, or what the blocks of the other one were computed from.
struct JobSource {
  // The position of a source that wrote what the job's blocks were computed from, not a block of
  // the job itself.
  static constexpr size_t kComputedFrom = std::numeric_limits<size_t>::max();

  JobRef job;
  size_t position;  // in the reading job's list of blocks: the first one that `job` writes
};

// What a job copies in one group: `count` blocks. In Work::ids they follow those of earlier parts.
struct JobPart {
  int group;
  size_t count;
};

// The number of a job in each channel; -1 for none.
using JobNumbers = std::array<int64_t, kChannels>;
constexpr JobNumbers kNoJobs{-1, -1, -1};

// What a job needs only until it has ended.
struct Work {
  uint32_t entries = 0;             // of the driver's queue, when the job is copied alone
  float submit_seconds = 0;         // that a thread is expected to take to submit it
  bool was_queued = false;          // true from when it enters the queue of its channel
  bool submission_started = false;  // it has left the queue, and may be on the device
  bool was_cancelled = false;       // cancel() was called
  bool is_staged = false;           // in all groups, as planned
  bool is_exchanged = false;        // with other ranks, as planned
  bool is_grouped = false;          // the caller has passed a list of ids for each group
  uint32_t rejectable_blocks = 0;   // in groups that can reject blocks
  uint32_t encoded_blocks = 0;      // of these, in encoded slots
  std::vector<JobPart> parts;
  std::vector<int64_t> ids;      // of all GPU blocks, then of the slot for each of them
  StreamPoint* after = nullptr;  // the job starts after it; null: at once

  // The latest jobs that must not overlap with this one, because they share a block or a slot.
  JobNumbers runs_after = kNoJobs;
  std::vector<JobSource> sources;
  // The blocks of a store were computed from blocks that these loads write, which are sources too.
  std::vector<JobRef> computed_from;

  std::shared_ptr<Transfer> transfer;  // from when a layer group is enqueued
  int enqueued_layer_groups = 0;
  double submitted_at = 0.0;

  size_t count() const { return ids.size() / 2; }
  const int64_t* blocks() const { return ids.data(); }
  const int64_t* slots() const { return ids.data() + count(); }
};

// A store or a load, from its submission until its last reference goes. The scheduler's lock guards
// everything except the number of references.
struct Job {
  int64_t id = 0;
  int64_t tag = 0;                      // Request::tag
  uint64_t nbytes = 0, link_bytes = 0;  // of the blocks, and between device and host
  // Atomic: the submitting thread sets it last, when the job may have ended and be read without the
  // lock.
  std::atomic<double> submit_seconds{0.0};
  double queue_seconds = 0.0, copy_seconds = 0.0;
  std::atomic<int> references{0};
  int layer_groups = 1;
  uint32_t corrupted = 0;  // how many of its rejected blocks are corrupted
  uint8_t channel = 0;
  State state = State::kQueued;
  CopyMethod copy_method = CopyMethod::kHost;
  Reason error;  // of a job that has failed
  // Of a job that has failed because blocks were rejected: where they are in its list of blocks.
  // Its other blocks were copied.
  std::unique_ptr<const std::vector<int64_t>> rejected;
  prefix::HeldPages pages;     // of a block manager, until it is told of the end
  std::unique_ptr<Work> work;  // null once it has ended
  Job* next = nullptr;         // in the queue, or in its transfer
  Job* next_ended = nullptr;   // in the list of unreported jobs

  bool has_ended() const { return state >= State::kDone; }
  bool has_succeeded() const { return state == State::kDone; }
  // Whether blocks were rejected, and that is all that went wrong.
  bool was_rejected() const {
    return error.kind() == Reason::Kind::kRejected || error.kind() == Reason::Kind::kCorrupted;
  }
  // "store 17".
  std::string name() const { return direction_name(channel) + (" " + std::to_string(id)); }
};

inline JobRef::JobRef(Job* job) : job_(job) {
  if (job_ != nullptr) job_->references.fetch_add(1);
}

inline void JobRef::release(Job* job) {
  if (job->references.fetch_sub(1) == 1) delete job;
}

// A list of jobs, linked through the member `next` of each, so that adding one cannot fail. Holds a
// reference to each.
template <Job* Job::* next>
class IntrusiveJobList {
 public:
  class Iterator {
   public:
    explicit Iterator(Job* job) : job_(job) {}
    Job& operator*() const { return *job_; }
    Iterator& operator++() {
      job_ = job_->*next;
      return *this;
    }
    bool operator!=(const Iterator& other) const { return job_ != other.job_; }

   private:
    Job* job_;
  };

  IntrusiveJobList() = default;
  IntrusiveJobList(IntrusiveJobList&& other) noexcept { swap(other); }
  IntrusiveJobList& operator=(IntrusiveJobList&& other) noexcept {
    IntrusiveJobList taken(std::move(other));
    swap(taken);
    return *this;
  }
  ~IntrusiveJobList() { clear(); }

  bool empty() const { return first_ == nullptr; }
  size_t size() const { return size_; }
  Job& front() const { return *first_; }
  Iterator begin() const { return Iterator(first_); }
  Iterator end() const { return Iterator(nullptr); }

  void push_back(const JobRef& job) noexcept {
    Job* added = job.get();
    added->references.fetch_add(1);
    added->*next = nullptr;
    (last_ == nullptr ? first_ : last_->*next) = added;
    last_ = added;
    ++size_;
  }

  JobRef pop_front() noexcept {
    Job* job = first_;
    first_ = job->*next;
    if (first_ == nullptr) last_ = nullptr;
    --size_;
    return JobRef::adopt(job);
  }

  void clear() noexcept {
    while (!empty()) pop_front();
  }

 private:
  void swap(IntrusiveJobList& other) noexcept {
    std::swap(first_, other.first_);
    std::swap(last_, other.last_);
    std::swap(size_, other.size_);
  }

  Job *first_ = nullptr, *last_ = nullptr;
  size_t size_ = 0;
};

using JobList = IntrusiveJobList<&Job::next>;
using EndedJobs = IntrusiveJobList<&Job::next_ended>;

}  // namespace kvswap
