#include "copy/staged_piece.h"

#include <algorithm>

namespace kvswap {
namespace {

constexpr uint64_t kGrowth = 7;

}  // namespace

uint64_t piece_unit(uint64_t block_bytes, uint64_t max_bytes, bool is_divisible) {
  const bool is_whole = !is_divisible || block_bytes <= std::min(max_bytes, kMaxUndividedBytes);
  return is_whole ? block_bytes : kStagingAlignment;
}

uint64_t piece_bytes(uint64_t done, uint64_t left, uint64_t unit, uint64_t max_bytes,
                     bool to_host) {
  // A load leaves at least the smallest piece for the end, or nothing.
  const uint64_t last =
      left > 2 * kMinPieceBytes ? std::max(kMinPieceBytes, left / (kGrowth + 1)) : 0;
  const uint64_t grown = to_host ? kGrowth * done : left - last;
  const uint64_t least = (kMinPieceBytes + unit - 1) / unit, most = max_bytes / unit;
  return unit * std::min(std::max(grown / unit, least), std::max(most, uint64_t{1}));
}

size_t num_small_pieces(uint64_t bytes) {
  size_t pieces = 1;
  for (; bytes > 2 * kMinPieceBytes; bytes /= kGrowth + 1) ++pieces;
  return pieces;
}

}  // namespace kvswap
