#pragma once

#include <deque>
#include <vector>

#include "cuda/context.h"
#include "event_pool.h"

namespace kvswap {

// A ring of memory on a GPU that pieces of copies pass through, one after another. Streams fill it,
// of this GPU or of others, and streams empty it. A piece waits until earlier pieces have left its
// place.
//
// One thread at a time. The memory is the caller's.
class StagingRing {
 public:
  struct Piece {
    uint64_t begin, end;
    cuda::Address address;  // of `begin`
    // Recorded, on streams of the ring's GPU, when the bytes of the piece are in the ring, and when
    // they have left it.
    cuda::Event filled, drained;
  };

  StagingRing(int device, cuda::Address begin, uint64_t bytes);
  ~StagingRing();
  StagingRing(const StagingRing&) = delete;
  StagingRing& operator=(const StagingRing&) = delete;

  // One more stream that fills the ring; and the other way round, for the last one.
  void add_filler(const cuda::StreamRef& stream) { fillers_.push_back(stream); }
  void remove_filler() noexcept { fillers_.pop_back(); }

  // Of the largest piece.
  uint64_t half() const { return bytes_ / 2; }
  // How many bytes the next piece may have, in one half of the ring, if its size is a multiple of
  // `unit`. Skips the rest of a half that is too small. A piece across the middle would keep the
  // next one waiting until it has left, with the link idle meanwhile: a store of 512 blocks of 160
  // x 4 KiB took 1.053 times as long as one big copy instead of 1.043 (H200).
  uint64_t room_for(uint64_t unit) noexcept;
  // The next piece, of this many bytes, valid until the next call. All fillers wait for each piece
  // that is forgotten: its place may be free in part, and the next filler takes the rest.
  const Piece& allocate(uint64_t bytes);

  // Makes a stream wait until all pieces so far have left the ring, if all of them leave on one
  // stream.
  void order_before(const cuda::StreamRef& stream) const;

  // Forgets all pieces, also those of a copy that failed halfway. None runs any more.
  void forget() noexcept;
  // How many events exist. Any thread may call.
  size_t num_events() const { return events_.num_created(); }

 private:
  void drop_first() noexcept;

  const cuda::Address address_;
  const uint64_t bytes_;
  uint64_t next_ = 0;         // where the next piece begins
  std::deque<Piece> pieces_;  // in the order of submission; none overlaps another
  EventPool events_;          // of the ring's GPU
  std::vector<cuda::StreamRef> fillers_;
};

}  // namespace kvswap
