#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "device/device.h"

namespace kvswap {

// What a job starts after: the work that a stream of the channel's device was given so far, or the
// work that an event stands for now.
struct After {
  bool is_event;
  void* handle;
};

// An event recorded on a stream. Jobs start after the work that the stream was given before it.
struct StreamPoint {
  Event event = nullptr;
  Stream stream = nullptr;  // a handle of the channel's device
  uint64_t thread = 0;      // that has recorded it: handle 2 is another stream in each thread
  uint64_t number = 0;      // grows with each record
  int users = 0;            // jobs that start after it and are not on the device yet
};

// The stream points of a channel's jobs.
//
// Each job has an event of its own. When kMaxStreamPoints (stream_point.cpp) are in use, a new job
// shares the latest event of its thread and stream, if there is one, and records it again: an
// earlier job that is still queued then waits for slightly later work. This cannot deadlock. A
// stream can wait for a job only once that job is on the device, and from then on a new record does
// not change what the job waits for.
//
// Not thread safe: the scheduler's lock guards it. All streams are of the handler's device, whose
// context is current.
class StreamPoints {
 public:
  explicit StreamPoints(Device& device) : device_(device) {}

  // Records a point after all work that the stream was given so far. Returns null if that has
  // ended.
  StreamPoint* record(Stream stream);
  // Each user calls this once, when it does not need the point any more. null: does nothing.
  void release(StreamPoint* point) noexcept;
  // Whether the work before it has ended.
  bool has_happened(const StreamPoint& point) const noexcept;

  size_t num_created() const { return all_.size(); }
  void destroy();

 private:
  // The latest one in use that this thread has recorded on the stream; null for none.
  StreamPoint* latest_on(Stream stream) const;
  StreamPoint* take_idle();

  Device& device_;
  std::vector<std::unique_ptr<StreamPoint>> all_;
  std::vector<StreamPoint*> idle_;  // has room for all
  uint64_t records_ = 0;
};

}  // namespace kvswap
