#pragma once

#include <cstdint>

namespace kvswap {

// The offset and the size of a piece in the staging buffer are multiples of this.
constexpr uint64_t kStagingAlignment = 256;

constexpr uint64_t kMinPieceBytes = 512 << 10;

// Bytes of the next piece, after `done` bytes and with `left` bytes to go; `most` fit. The link
// starts only when the first piece of a store is packed, and has stopped when the last piece of a
// load is unpacked, so those are small. A kernel is more than three times as fast as the link:
// store pieces grow threefold, and each load piece takes 3/4 of the remaining bytes.
uint64_t piece_bytes(uint64_t done, uint64_t left, uint64_t block_bytes, uint64_t most,
                     bool to_host);

}  // namespace kvswap
