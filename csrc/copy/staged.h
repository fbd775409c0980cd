#pragma once

#include <deque>

#include "copy/batch.h"
#include "copy/packed.h"
#include "cuda/event_pool.h"

namespace kvswap {

// The streams of a staged copy: the copy engine's and the kernels', of one device.
struct StagedStreams {
  int device;
  cuda::Stream copies, kernels;
};

// A buffer on the GPU through which blocks go to the host or come from there. They are moved piece
// by piece: a kernel packs blocks into a piece of the buffer while the copy engine moves the piece
// before it in host pages; loads the other way round. Pieces follow one another round the buffer,
// each behind the end of those whose place it takes.
//
// Whoever copies has the context of the device and is the only one. The memory is the caller's.
class StagingBuffer {
 public:
  StagingBuffer(cuda::Address begin, uint64_t bytes);
  ~StagingBuffer() { destroy(); }

  // Returns the stream on which the end is. A load starts behind what was given to streams.copies
  // before, a store behind what was given to streams.kernels.
  cuda::Stream copy(const PackedCopy& copy, const StagedStreams& streams,
                    const cuda::Kernels& kernels, const BatchOptions& options);

  // Makes a stream wait for all pieces so far.
  void order_before(cuda::Stream stream) const;

  // All pieces are over, also those of a copy that failed on the way.
  void forget() noexcept;
  // Those that exist. Any thread may ask.
  size_t events() const { return events_.created(); }
  void destroy();

 private:
  struct Piece {
    uint64_t begin, end;
    cuda::Event moved, free;  // out of the first of its two steps, and of the second
  };
  // The next piece of this many bytes, for which `stream` waits.
  Piece& take(uint64_t bytes, cuda::Stream stream);
  void drop_first() noexcept;

  const cuda::Address address_;
  const uint64_t bytes_;
  uint64_t next_ = 0;         // where the next piece begins
  std::deque<Piece> pieces_;  // in the order of submission; none overlaps another
  EventPool events_{cuda::kEventDisableTiming};
};

constexpr uint64_t kSmallestPiece = 512 << 10;

// How many bytes the next piece has, of `left` that are not moved yet, `done` before it. The first
// piece of a store is packed before the link starts, and the last one of a load is unpacked when
// the link has stopped: those are small, and the others as large as the buffer allows. A kernel is
// more than three times as fast as the link, so that each piece may be so much larger.
uint64_t piece_bytes(uint64_t done, uint64_t left, uint64_t block_bytes, uint64_t most,
                     bool to_host);

}  // namespace kvswap
