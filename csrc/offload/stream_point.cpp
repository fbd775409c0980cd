#include "offload/stream_point.h"

#include <atomic>

#include "event_pool.h"

namespace kvswap {
namespace {

constexpr size_t kMaxStreamPoints = 256;

// Unlike the system's number, never that of a thread that has ended.
uint64_t this_thread() {
  static std::atomic<uint64_t> last{0};
  thread_local const uint64_t number = ++last;
  return number;
}

}  // namespace

StreamPoint* StreamPoints::record(Stream stream) {
  if (device_.is_idle(stream)) return nullptr;
  const bool is_full = all_.size() - idle_.size() >= kMaxStreamPoints;
  StreamPoint* point = is_full ? latest_on(stream) : nullptr;
  if (point == nullptr) point = take_idle();
  point->stream = stream;
  point->thread = this_thread();
  ++point->users;
  try {
    device_.record_event(point->event, stream, " on the stream that the job starts after");
  } catch (...) {
    release(point);
    throw;
  }
  point->number = ++records_;
  return point;
}

StreamPoint* StreamPoints::latest_on(Stream stream) const {
  StreamPoint* latest = nullptr;
  for (const auto& point : all_) {
    if (point->users == 0 || point->stream != stream) continue;
    if (point->thread != this_thread()) continue;
    if (latest == nullptr || point->number > latest->number) latest = point.get();
  }
  return latest;
}

StreamPoint* StreamPoints::take_idle() {
  if (idle_.empty()) {
    make_room(all_, all_.size());
    make_room(idle_, all_.size());
    auto point = std::make_unique<StreamPoint>();
    point->event = device_.create_event(/*timed=*/false);
    all_.push_back(std::move(point));
    return all_.back().get();
  }
  StreamPoint* point = idle_.back();
  idle_.pop_back();
  return point;
}

void StreamPoints::release(StreamPoint* point) noexcept {
  if (point == nullptr || --point->users > 0) return;
  idle_.push_back(point);
}

bool StreamPoints::has_happened(const StreamPoint& point) const noexcept {
  try {
    return device_.has_happened(point.event);
  } catch (const std::exception&) {  // who waits for it gets the error
    return false;
  }
}

void StreamPoints::destroy() {
  for (const auto& point : all_) device_.destroy_event(point->event);
  all_.clear();
  idle_.clear();
}

}  // namespace kvswap
