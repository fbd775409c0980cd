#include "offload/stream_point.h"

#include "cuda/event_pool.h"

namespace kvswap {
namespace {

constexpr size_t kMostMoments = 256;

}  // namespace

Moment* Moments::take(cuda::Stream stream) {
  const cuda::Result state = cuda::driver().query_stream(stream);
  if (state == cuda::kSuccess) return nullptr;
  if (state != cuda::kNotReady) KVSWAP_DRIVER_CHECK(state, "cuStreamQuery");
  const bool is_full = all_.size() - idle_.size() >= kMostMoments;
  Moment* moment = is_full ? latest(stream) : nullptr;
  if (moment == nullptr) moment = take_idle();
  moment->stream = stream;
  ++moment->users;
  const cuda::Result result = cuda::driver().record_event(moment->event, stream);
  if (result != cuda::kSuccess) give(moment);
  KVSWAP_DRIVER_CHECK(result, "cuEventRecord on the stream that the job starts behind");
  moment->number = ++records_;
  return moment;
}

// Of those in use.
Moment* Moments::latest(cuda::Stream stream) const {
  Moment* latest = nullptr;
  for (const auto& moment : all_) {
    if (moment->users == 0 || moment->stream != stream) continue;
    if (latest == nullptr || moment->number > latest->number) latest = moment.get();
  }
  return latest;
}

Moment* Moments::take_idle() {
  if (idle_.empty()) {
    make_room(all_, all_.size());
    make_room(idle_, all_.size());
    auto moment = std::make_unique<Moment>();
    KVSWAP_DRIVER_CHECK(cuda::driver().create_event(&moment->event, cuda::kEventDisableTiming),
                        "cuEventCreate");
    all_.push_back(std::move(moment));
    return all_.back().get();
  }
  Moment* moment = idle_.back();
  idle_.pop_back();
  return moment;
}

void Moments::give(Moment* moment) noexcept {
  if (moment == nullptr || --moment->users > 0) return;
  idle_.push_back(moment);
}

bool Moments::is_over(const Moment& moment) const {
  return cuda::driver().query_event(moment.event) == cuda::kSuccess;
}

void Moments::destroy() {
  // On a lost device this fails, and there is nothing to free any more.
  for (const auto& moment : all_) cuda::driver().destroy_event(moment->event);
  all_.clear();
  idle_.clear();
}

}  // namespace kvswap
