#pragma once

#include <deque>

#include "copy/batch.h"
#include "copy/packing.h"
#include "cuda/context.h"
#include "event_pool.h"

namespace kvswap {

// The streams of a staged copy: the copy engine's and the kernels', of one device.
struct StagedStreams {
  int device;
  cuda::Stream copies, kernels;
};

// A ring buffer on the GPU for copies to and from host pages. A store is copied in pieces: a kernel
// packs blocks into one piece of the buffer while the copy engine copies the piece before it to the
// host pages. A load goes the other way. A piece waits until earlier pieces have left its place in
// the buffer.
//
// One thread at a time; the context of its device is current. The memory is the caller's.
class StagingBuffer {
 public:
  StagingBuffer(cuda::Address begin, uint64_t bytes);
  ~StagingBuffer();

  // Copies whole pieces from byte `begin` on, until they have `bytes` bytes or more. Returns where
  // they end. A load starts after the work in streams.copies so far and ends on streams.kernels, a
  // store the other way round.
  uint64_t copy(const PagedCopy& copy, const PackTable& table, uint64_t begin, uint64_t bytes,
                const StagedStreams& streams, const BatchOptions& options);

  // Makes a stream wait for all pieces so far.
  void order_before(cuda::Stream stream) const;

  // Forgets all pieces, also those of a copy that failed halfway. None runs any more.
  void forget() noexcept;
  // How many events exist. Any thread may call.
  size_t num_events() const { return events_.num_created(); }

 private:
  struct Piece {
    uint64_t begin, end;
    // Recorded when its bytes are in the buffer, and when they have left it.
    cuda::Event filled, drained;
  };
  uint64_t half() const { return bytes_ / 2; }
  // How many bytes the next piece may have, in one half of the buffer. Skips the rest of a half
  // that is too small. A piece across the middle would keep the next one waiting until it has left,
  // with the link idle meanwhile: a store of 512 blocks of 160 x 4 KiB took 1.053 times as long as
  // one big copy instead of 1.043 (H200).
  uint64_t room_for(uint64_t unit) noexcept;
  // The next piece, of this many bytes; `stream` waits until its place is free.
  Piece& allocate(uint64_t bytes, cuda::Stream stream);
  void drop_first() noexcept;

  const cuda::Address address_;
  const uint64_t bytes_;
  uint64_t next_ = 0;         // where the next piece begins
  std::deque<Piece> pieces_;  // in the order of submission; none overlaps another
  EventPool events_{[] { return cuda::create_event(cuda::kEventDisableTiming); },
                    [](cuda::Event event) { cuda::driver().destroy_event(event); }};
};

}  // namespace kvswap
