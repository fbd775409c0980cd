#include "kernels/digest.h"
#include "kernels/slot.h"

// The kernel that digests blocks, found by its name in the module that setup.py makes of this file.
// csrc/encoding/digest.cpp does the same on the CPU.
namespace kvswap {
namespace {

constexpr uint32_t kWarps = kDigestWarps;
constexpr uint32_t kVectors = kDigestUnitBytes / 16, kHalf = kVectors / 2;
static_assert(kHalf == 32, "a thread has a vector of each half of a unit");

// 16 bytes of a tile, zeros behind its end.
template <bool kAligned>
__device__ uint4 vector_at(const unsigned char* tile, uint32_t offset, uint32_t bytes) {
  uint4 vector{0, 0, 0, 0};
  if (kAligned) {
    if (offset < bytes) vector = __ldcg(reinterpret_cast<const uint4*>(tile + offset));
  } else {
    auto* const to = reinterpret_cast<unsigned char*>(&vector);
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i) {
      if (offset + i < bytes) to[i] = __ldcg(tile + offset + i);
    }
  }
  return vector;
}

__device__ void add(uint64_t& sum, const uint4& a, const uint4& b, const uint4& key_a,
                    const uint4& key_b) {
  sum += uint64_t{a.x + key_a.x} * (b.x + key_b.x);
  sum += uint64_t{a.y + key_a.y} * (b.y + key_b.y);
  sum += uint64_t{a.z + key_a.z} * (b.z + key_b.z);
  sum += uint64_t{a.w + key_a.w} * (b.w + key_b.w);
}

// By all threads of a warp; the first one has the sums.
template <bool kAligned>
__device__ DigestSums sums_of(const unsigned char* tile, uint32_t bytes, const uint4* keys,
                              unsigned lane) {
  DigestSums sums;
#pragma unroll 4
  for (uint32_t at = 0; at < bytes; at += kDigestUnitBytes) {
    const uint4 a = vector_at<kAligned>(tile, at + 16 * lane, bytes);
    const uint4 b = vector_at<kAligned>(tile, at + 16 * (lane + kHalf), bytes);
    const uint4* const key = keys + at / 16 + lane;
    add(sums.first, a, b, key[0], key[kHalf]);
    add(sums.second, a, b, key[kVectors], key[kVectors + kHalf]);
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    sums.first += __shfl_down_sync(~0u, sums.first, distance);
    sums.second += __shfl_down_sync(~0u, sums.second, distance);
  }
  return sums;
}

// Whether the encoder or the decoder has refused blocks[i].
__device__ bool was_rejected(const DigestArguments& a, uint32_t i) {
  if (a.rejects == 0) return false;
  const uint8_t state = reinterpret_cast<const volatile uint8_t*>(a.states)[i];
  return state != static_cast<uint8_t>(SlotState::kGood) &&
         state != static_cast<uint8_t>(SlotState::kCorrupted) &&
         state != static_cast<uint8_t>(SlotState::kOverwritten);
}

__device__ uint64_t tag_in(const SlotDigests* row) {
  return *reinterpret_cast<const volatile uint64_t*>(&row->tag);
}

__device__ void set_state(const DigestArguments& a, uint32_t i, SlotState state) {
  reinterpret_cast<volatile uint8_t*>(a.states)[i] = static_cast<uint8_t>(state);
}

// Of several tiles the last one stays: both numbers are written at once.
__device__ void report(SlotDigests* row, uint64_t tile, uint64_t digest) {
  const ulonglong2 mismatch{tile, digest};
  *reinterpret_cast<ulonglong2*>(&row->tile) = mismatch;
}

// What is to be done for blocks[i] whatever its digests are. By one thread.
__device__ void finish_block(const DigestArguments& a, uint32_t i) {
  SlotDigests* const row = digests_at(a.rows, a.row_stride, a.slots[i]);
  const uint64_t right = digest_tag(a.slots[i], a.stores[i]);
  const bool is_rejected = was_rejected(a, i);
  if (a.task == DigestTask::kWrite) {
    row->tag = is_rejected ? ~right : right;
  } else if (a.task == DigestTask::kCompareAgain) {
    if (is_rejected) row->tag = ~right;
  } else {
    const uint64_t tag = tag_in(row);
    if (a.stores[i] == 0 || tag == ~right) {
      set_state(a, i, SlotState::kRefused);
    } else if (is_rejected || tag != right) {
      report(row, kNoTile, 0);
      set_state(a, i, SlotState::kCorrupted);
    }
  }
}

// What one warp does with the digests of some tiles of blocks[i], from number `first` on: thread t
// has that of tile first + t, if t < count. stored: that of the slot.
__device__ void finish_tiles(const DigestArguments& a, uint32_t i, uint32_t first, uint32_t count,
                             uint64_t digest, uint64_t stored, unsigned lane) {
  SlotDigests* const row = digests_at(a.rows, a.row_stride, a.slots[i]);
  const uint64_t right = digest_tag(a.slots[i], a.stores[i]);
  if (a.task == DigestTask::kWrite) {
    if (lane < count) digests_behind(row)[first + lane] = digest ^ right;
    return;
  }
  const unsigned different = __ballot_sync(~0u, lane < count && digest != (stored ^ right));
  if (different == 0 || lane + 1 != static_cast<unsigned>(__ffs(different))) return;
  if (a.task == DigestTask::kCompare) {
    if (a.stores[i] == 0 || tag_in(row) == ~right) return;  // refused by finish_block()
    report(row, first + lane, digest);
    set_state(a, i, SlotState::kCorrupted);
  } else if (!was_rejected(a, i)) {
    report(row, first + lane, digest);
    row->tag = ~right;
    set_state(a, i, SlotState::kOverwritten);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * kWarps)
    kvswap_digest(const __grid_constant__ DigestArguments a) {
  __shared__ uint4 keys[kDigestKeys / 4];
  // Of the turn before, too: warp 0 may not have read those yet.
  __shared__ uint64_t digests[2][kWarps];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // The first CTA sees to the blocks, the others to the tiles. Reads over the link of one sector
  // wait for each other, 0.4 us each: the CTAs of the tiles would all wait for the states.
  if (blockIdx.x == 0) {
    for (uint32_t i = threadIdx.x; i < a.block_count; i += blockDim.x) finish_block(a, i);
    return;
  }
  for (uint32_t i = threadIdx.x; i < kDigestKeys; i += blockDim.x) {
    reinterpret_cast<uint32_t*>(keys)[i] = digest_key(i);
  }
  __syncthreads();
  const uint32_t groups = (a.tile_count + kWarps - 1) / kWarps;
  unsigned turn = 0;
  for (uint32_t number = blockIdx.x - 1; number < a.block_count * groups;
       number += gridDim.x - 1, turn ^= 1) {
    const uint32_t i = number / groups, from = kWarps * (number % groups);
    const uint32_t first = a.first_tile + from, count = min(kWarps, a.tile_count - from);
    // On its way over the link while the tiles are read.
    uint64_t stored = 0;
    if (warp == 0 && lane < count && a.task != DigestTask::kWrite) {
      SlotDigests* const row = digests_at(a.rows, a.row_stride, a.slots[i]);
      stored = reinterpret_cast<const volatile uint64_t*>(digests_behind(row))[first + lane];
    }
    if (warp < count) {
      const DigestTile tile = reinterpret_cast<const DigestTile*>(a.tiles)[first + warp];
      const auto* const bytes = reinterpret_cast<const unsigned char*>(
          tile.base + static_cast<uint64_t>(a.blocks[i]) * tile.stride);
      const auto size = static_cast<uint32_t>(tile.bytes);
      const DigestSums sums = a.word_bytes == 16 ? sums_of<true>(bytes, size, keys, lane)
                                                 : sums_of<false>(bytes, size, keys, lane);
      if (lane == 0) digests[turn][warp] = digest_of(sums, first + warp);
    }
    __syncthreads();
    if (warp == 0) {
      const uint64_t digest = digests[turn][lane % kWarps];
      finish_tiles(a, i, first, count, digest, stored, lane);
    }
  }
}

}  // namespace kvswap
