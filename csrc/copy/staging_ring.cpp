#include "copy/staging_ring.h"

#include <algorithm>

#include "copy/staged_piece.h"

namespace kvswap {
namespace {

constexpr size_t kMaxPieces = 32;

uint64_t round_up(uint64_t bytes) {
  return (bytes + kStagingAlignment - 1) / kStagingAlignment * kStagingAlignment;
}

cuda::Event create_event(int device) {
  const cuda::ContextGuard context(device);
  return cuda::create_event(cuda::kEventDisableTiming);
}

}  // namespace

StagingRing::StagingRing(int device, cuda::Address begin, uint64_t bytes)
    : address_(begin),
      bytes_(bytes / (2 * kStagingAlignment) * (2 * kStagingAlignment)),
      events_([device] { return create_event(device); },
              [](cuda::Event event) { cuda::driver().destroy_event(event); }) {}

StagingRing::~StagingRing() {
  forget();
  events_.destroy_idle();
}

uint64_t StagingRing::room_for(uint64_t unit) noexcept {
  const uint64_t left = half() - next_ % half();
  if (left >= std::min(half(), std::max(unit, kMinPieceBytes))) return left;
  next_ += left;
  return half();
}

const StagingRing::Piece& StagingRing::allocate(uint64_t bytes) {
  const uint64_t begin = next_ + bytes <= bytes_ ? next_ : 0, end = round_up(begin + bytes);
  // The pieces in its place are the oldest ones. They leave on several streams: none of them stands
  // for the others.
  const auto in_place = [&](const Piece& piece) { return piece.begin < end && begin < piece.end; };
  while (std::any_of(pieces_.begin(), pieces_.end(), in_place) || pieces_.size() >= kMaxPieces) {
    for (const cuda::StreamRef& filler : fillers_)
      cuda::wait_event(filler, pieces_.front().drained);
    drop_first();
  }
  // First: forget() finds it if the rest fails.
  pieces_.push_back({begin, end, address_ + begin, nullptr, nullptr});
  Piece& piece = pieces_.back();
  piece.filled = events_.take();
  piece.drained = events_.take();
  next_ = end;
  return piece;
}

void StagingRing::drop_first() noexcept {
  // The driver has all waits for these records already: a new record does not change them.
  for (const cuda::Event event : {pieces_.front().filled, pieces_.front().drained})
    events_.give(event);
  pieces_.pop_front();
}

void StagingRing::order_before(const cuda::StreamRef& stream) const {
  if (!pieces_.empty()) cuda::wait_event(stream, pieces_.back().drained);
}

void StagingRing::forget() noexcept {
  while (!pieces_.empty()) drop_first();
}

}  // namespace kvswap
