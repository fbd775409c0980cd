#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "device/device.h"

namespace kvswap {

// An event recorded at a point of a stream: jobs start when the work before it has ended.
struct StreamPoint {
  Event event = nullptr;
  Stream stream = nullptr;  // a handle of the channel's device
  uint64_t number = 0;      // grows with each record
  int users = 0;            // jobs
};

// The stream points of a channel's jobs.
//
// A channel keeps up to kMaxStreamPoints events, one for each job. Beyond that, jobs that start
// after the same stream share an event, which is recorded again at each submission: an earlier job
// may then wait for slightly later work. This cannot deadlock: a job is put on the device before
// any stream can wait for it, and from then on it waits for the event as it was recorded at that
// time.
//
// Not thread safe: the scheduler's lock guards it. All streams are of the handler's device, whose
// context is current.
class StreamPoints {
 public:
  explicit StreamPoints(Device& device) : device_(device) {}

  // After all that the stream was given so far; null when that has ended.
  StreamPoint* take(Stream stream);
  // One user has no need of it any more. null: does nothing.
  void give(StreamPoint* point) noexcept;
  // Whether the work before it has ended.
  bool is_over(const StreamPoint& point) const noexcept;

  size_t created() const { return all_.size(); }
  void destroy();

 private:
  // The latest one in use that was recorded on the stream; null for none.
  StreamPoint* latest(Stream stream) const;
  StreamPoint* take_idle();

  Device& device_;
  std::vector<std::unique_ptr<StreamPoint>> all_;
  std::vector<StreamPoint*> idle_;  // has room for all
  uint64_t records_ = 0;
};

}  // namespace kvswap
