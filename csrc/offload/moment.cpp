#include "moment.h"

namespace kvswap {
namespace {

constexpr size_t kMostMoments = 256;

}  // namespace

Moment* Moments::take(cuda::Stream stream) {
  const cuda::Result state = cuda::driver().query_stream(stream);
  if (state == cuda::kSuccess) return nullptr;
  if (state != cuda::kNotReady) KVSWAP_DRIVER_CHECK(state, "cuStreamQuery");
  const auto latest = latest_.find(stream);
  const bool is_full = all_.size() - idle_.size() >= kMostMoments;
  Moment* moment = is_full && latest != latest_.end() ? latest->second : make(stream);
  ++moment->users;
  const cuda::Result result = cuda::driver().record_event(moment->event, stream);
  if (result != cuda::kSuccess) give(moment);
  KVSWAP_DRIVER_CHECK(result, "cuEventRecord on the stream that the job starts behind");
  latest_[stream] = moment;
  return moment;
}

Moment* Moments::make(cuda::Stream stream) {
  if (idle_.empty()) {
    cuda::Event event = nullptr;
    KVSWAP_DRIVER_CHECK(cuda::driver().create_event(&event, cuda::kEventDisableTiming),
                        "cuEventCreate");
    all_.push_back(std::make_unique<Moment>(Moment{event, stream, 0}));
    idle_.push_back(all_.back().get());
  }
  Moment* moment = idle_.back();
  idle_.pop_back();
  moment->stream = stream;
  return moment;
}

void Moments::give(Moment* moment) {
  if (moment == nullptr || --moment->users > 0) return;
  const auto latest = latest_.find(moment->stream);
  if (latest != latest_.end() && latest->second == moment) latest_.erase(latest);
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
  latest_.clear();
}

}  // namespace kvswap
