#pragma once

#include <cstddef>
#include <cstdint>

namespace kvswap {

// A ring of slot states: a byte for each block that a channel has in flight and that its group can
// reject. Copies overwrite the byte of a rejected block, and leave the others. The channel reads it
// when the transfer has ended. A transfer's states are contiguous. They are zero when it begins.
//
// Not thread safe: the scheduler's lock guards it. Copies write only states that are taken.
class SlotStates {
 public:
  // The most such blocks in one transfer, and in all that are in flight.
  static constexpr size_t kCount = 1 << 20;

  // The states of a transfer, counted from the ring's first use on.
  struct Range {
    uint64_t from = 0;  // before what the end of the ring leaves over
    uint64_t begin = 0, end = 0;

    size_t count() const { return end - begin; }
  };

  // states: kCount zeros, which the caller owns.
  void use(uint8_t* states) { states_ = states; }

  bool has_room(size_t count) const { return next(count).end - oldest_ <= kCount; }
  // Takes the next `count` states. Requires has_room(count).
  Range take(size_t count);
  uint8_t* at(const Range& range) const { return states_ + range.begin % kCount; }
  // Gives back, as zeros, the range that was taken first or last.
  void give(const Range& range) noexcept;

 private:
  Range next(size_t count) const;

  uint8_t* states_ = nullptr;
  uint64_t oldest_ = 0, newest_ = 0;  // what is taken is from oldest_ to newest_ - 1
};

}  // namespace kvswap
