#pragma once

#include <cstddef>
#include <cstdint>

namespace kvswap {

// The offset and the size of a piece in the staging buffer are multiples of this.
constexpr uint64_t kStagingAlignment = 256;

constexpr uint64_t kMinPieceBytes = 512 << 10;

// A piece has whole blocks, whose pages are one copy each. Larger blocks are divided: the link
// would be idle for long while a kernel packs or unpacks one.
constexpr uint64_t kMaxUndividedBytes = 8 << 20;

// The largest piece of a copy that the calling thread only begins. It keeps the link busy for 150
// us, in which another thread wakes up, and has so few pages that the call returns soon.
constexpr uint64_t kMaxBegunPieceBytes = 8 << 20;

// With relays. staging_bytes: of the GPU, for both directions. links: the own one and the relays.
//
// The smallest transfer of a group in which relays take part: in smaller ones they would come too
// late.
constexpr uint64_t min_relayed_bytes(uint64_t staging_bytes) { return staging_bytes / 16; }
// The largest piece: each link has four in the ring of a direction.
constexpr uint64_t max_relayed_piece_bytes(uint64_t staging_bytes, size_t links) {
  return staging_bytes / 8 / links;
}

// A piece has a multiple of this many bytes: of a whole block, or of kStagingAlignment if blocks
// are divided. max_bytes: of a piece. Blocks that are not divisible are never larger than that.
uint64_t piece_unit(uint64_t block_bytes, uint64_t max_bytes, bool is_divisible);

// The size of the next piece, after `done` bytes and with `left` bytes to go: a multiple of `unit`,
// which may be more than is left. It has `max_bytes` at most, or one unit.
// The first piece of a store is small, because the link is idle while it is packed. The last piece
// of a load is small, because the link is idle while it is unpacked. A kernel is more than seven
// times as fast as the link, so a store piece has seven times as many bytes as all before it
// together, and a load piece 7/8 of the remaining bytes.
uint64_t piece_bytes(uint64_t done, uint64_t left, uint64_t unit, uint64_t max_bytes, bool to_host);

// How many pieces a copy has whose bytes would fit into one: piece_bytes() makes the first ones of
// a store small, and the last ones of a load.
size_t num_small_pieces(uint64_t bytes);

}  // namespace kvswap
