#include "copy/staged.h"

#include <algorithm>

#include "copy/staged_piece.h"

namespace kvswap {
namespace {

constexpr size_t kMaxPieces = 32;

uint64_t round_up(uint64_t bytes) {
  return (bytes + kStagingAlignment - 1) / kStagingAlignment * kStagingAlignment;
}

}  // namespace

StagingBuffer::StagingBuffer(cuda::Address begin, uint64_t bytes)
    : address_(begin), bytes_(bytes / (2 * kStagingAlignment) * (2 * kStagingAlignment)) {}

StagingBuffer::~StagingBuffer() {
  forget();
  events_.destroy_idle();
}

uint64_t StagingBuffer::copy(const PagedCopy& copy, const PackTable& table, uint64_t begin,
                             uint64_t bytes, const StagedStreams& streams,
                             const BatchOptions& options) {
  const cuda::Stream first = copy.to_host ? streams.kernels : streams.copies;
  const cuda::Stream second = copy.to_host ? streams.copies : streams.kernels;
  const cuda::Driver& driver = cuda::driver();
  const Packing& packing = table.packing;
  const uint64_t block_bytes = packing.packed_bytes(copy.slabs);
  const uint64_t all = copy.count * block_bytes, first_byte = begin;
  const uint64_t unit = piece_unit(block_bytes, half(), packing.is_divisible());
  while (begin < all && begin - first_byte < bytes) {
    const bool gives_all = bytes - (begin - first_byte) >= all - begin;
    const uint64_t room = room_for(unit);
    const uint64_t max_bytes = gives_all ? room : std::min(room, kMaxBegunPieceBytes);
    const uint64_t in_piece =
        piece_bytes(copy.before + begin, all - begin + copy.after, unit, max_bytes, copy.to_host);
    const uint64_t end = std::min(begin + in_piece, all);
    const Piece& piece = allocate(end - begin, first);
    const uint64_t packed = address_ + piece.begin;
    const auto move = [&](cuda::Stream stream) {
      if (stream == streams.kernels) {
        table.pack(copy, begin, end, packed, stream);
      } else {
        copy_batch(packing.page_fragments(copy, begin, end, packed), {streams.device, stream},
                   options);
      }
    };
    move(first);
    KVSWAP_DRIVER_CHECK(driver.record_event(piece.filled, first), "cuEventRecord");
    KVSWAP_DRIVER_CHECK(driver.wait_event(second, piece.filled, 0), "cuStreamWaitEvent");
    move(second);
    KVSWAP_DRIVER_CHECK(driver.record_event(piece.drained, second), "cuEventRecord");
    begin = end;
  }
  return begin;
}

uint64_t StagingBuffer::room_for(uint64_t unit) noexcept {
  const uint64_t left = half() - next_ % half();
  if (left >= std::min(half(), std::max(unit, kMinPieceBytes))) return left;
  next_ += left;
  return half();
}

StagingBuffer::Piece& StagingBuffer::allocate(uint64_t bytes, cuda::Stream stream) {
  const uint64_t begin = next_ + bytes <= bytes_ ? next_ : 0, end = round_up(begin + bytes);
  // The pieces in its place are the oldest ones.
  cuda::Event drained = nullptr;
  const auto in_place = [&](const Piece& piece) { return piece.begin < end && begin < piece.end; };
  while (std::any_of(pieces_.begin(), pieces_.end(), in_place) || pieces_.size() >= kMaxPieces) {
    drained = pieces_.front().drained;
    drop_first();
  }
  if (drained != nullptr) {
    KVSWAP_DRIVER_CHECK(cuda::driver().wait_event(stream, drained, 0), "cuStreamWaitEvent");
  }
  pieces_.push_back({begin, end, nullptr, nullptr});  // first: forget() finds it if the rest fails
  Piece& piece = pieces_.back();
  piece.filled = events_.take();
  piece.drained = events_.take();
  next_ = end;
  return piece;
}

void StagingBuffer::drop_first() noexcept {
  // The driver has all waits for these records already: a new record does not change them.
  for (const cuda::Event event : {pieces_.front().filled, pieces_.front().drained})
    events_.give(event);
  pieces_.pop_front();
}

void StagingBuffer::order_before(cuda::Stream stream) const {
  if (pieces_.empty()) return;
  KVSWAP_DRIVER_CHECK(cuda::driver().wait_event(stream, pieces_.back().drained, 0),
                      "cuStreamWaitEvent");
}

void StagingBuffer::forget() noexcept {
  while (!pieces_.empty()) drop_first();
}

}  // namespace kvswap
