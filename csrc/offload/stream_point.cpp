#include "offload/stream_point.h"

#include "cuda/event_pool.h"

namespace kvswap {
namespace {

constexpr size_t kMaxStreamPoints = 256;

}  // namespace

StreamPoint* StreamPoints::take(cuda::Stream stream) {
  const cuda::Result state = cuda::driver().query_stream(stream);
  if (state == cuda::kSuccess) return nullptr;
  if (state != cuda::kNotReady) KVSWAP_DRIVER_CHECK(state, "cuStreamQuery");
  const bool is_full = all_.size() - idle_.size() >= kMaxStreamPoints;
  StreamPoint* point = is_full ? latest(stream) : nullptr;
  if (point == nullptr) point = take_idle();
  point->stream = stream;
  ++point->users;
  const cuda::Result result = cuda::driver().record_event(point->event, stream);
  if (result != cuda::kSuccess) give(point);
  KVSWAP_DRIVER_CHECK(result, "cuEventRecord on the stream that the job starts after");
  point->number = ++records_;
  return point;
}

StreamPoint* StreamPoints::latest(cuda::Stream stream) const {
  StreamPoint* latest = nullptr;
  for (const auto& point : all_) {
    if (point->users == 0 || point->stream != stream) continue;
    if (latest == nullptr || point->number > latest->number) latest = point.get();
  }
  return latest;
}

StreamPoint* StreamPoints::take_idle() {
  if (idle_.empty()) {
    make_room(all_, all_.size());
    make_room(idle_, all_.size());
    auto point = std::make_unique<StreamPoint>();
    KVSWAP_DRIVER_CHECK(cuda::driver().create_event(&point->event, cuda::kEventDisableTiming),
                        "cuEventCreate");
    all_.push_back(std::move(point));
    return all_.back().get();
  }
  StreamPoint* point = idle_.back();
  idle_.pop_back();
  return point;
}

void StreamPoints::give(StreamPoint* point) noexcept {
  if (point == nullptr || --point->users > 0) return;
  idle_.push_back(point);
}

bool StreamPoints::is_over(const StreamPoint& point) const {
  return cuda::driver().query_event(point.event) == cuda::kSuccess;
}

void StreamPoints::destroy() {
  // On a lost device this fails, and there is nothing to free any more.
  for (const auto& point : all_) cuda::driver().destroy_event(point->event);
  all_.clear();
  idle_.clear();
}

}  // namespace kvswap
