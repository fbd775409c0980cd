#include "offload/slot_states.h"

#include <algorithm>

namespace kvswap {

// What take() would return.
SlotStates::Range SlotStates::next(size_t count) const {
  const uint64_t left = kCount - newest_ % kCount;
  const uint64_t begin = count <= left ? newest_ : newest_ + left;
  return {newest_, begin, begin + count};
}

SlotStates::Range SlotStates::take(size_t count) {
  const Range taken = next(count);
  newest_ = taken.end;
  return taken;
}

void SlotStates::give(const Range& range) noexcept {
  if (range.count() == 0) return;
  std::fill_n(at(range), range.count(), uint8_t{0});
  if (range.end == newest_) {
    newest_ = range.from;
  } else {
    oldest_ = range.end;
  }
  if (oldest_ == newest_) oldest_ = newest_ = 0;  // all of the ring is one piece again
}

}  // namespace kvswap
