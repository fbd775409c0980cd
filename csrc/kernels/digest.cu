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

// What a slot and the copy say of a block besides its digests.
struct Mark {
  uint64_t tag = 0;
  bool was_rejected = false;  // by the encoder or the decoder
};

// Two reads over the link. Those of one sector wait for each other, about 1 us each, so not every
// CTA that has tiles of the block may make them.
__device__ Mark read_mark(const DigestArguments& a, uint32_t i) {
  Mark mark;
  if (a.task == DigestTask::kCompare) {
    const SlotDigests* const row = digests_at(a.rows, a.row_stride, a.slots[i]);
    mark.tag = *reinterpret_cast<const volatile uint64_t*>(&row->tag);
  }
  if (a.rejects != 0) {
    const uint8_t state = reinterpret_cast<const volatile uint8_t*>(a.states)[i];
    mark.was_rejected = state != static_cast<uint8_t>(SlotState::kGood) &&
                        state != static_cast<uint8_t>(SlotState::kCorrupted) &&
                        state != static_cast<uint8_t>(SlotState::kOverwritten);
  }
  return mark;
}

// What one warp does with the digests of some tiles of blocks[i], from number `first` on: thread t
// has that of tile first + t, if t < count. stored: that of the slot. mark: of the warp that has
// the block's first tile; the others read it when their digests differ.
__device__ void finish_tiles(const DigestArguments& a, uint32_t i, uint32_t first, uint32_t count,
                             uint64_t digest, uint64_t stored, Mark mark, unsigned lane) {
  SlotDigests* const row = digests_at(a.rows, a.row_stride, a.slots[i]);
  const uint64_t right = digest_tag(a.slots[i], a.stores[i]);
  const bool is_first = first == a.first_tile;
  if (a.task == DigestTask::kWrite) {
    if (lane < count) digests_behind(row)[first + lane] = digest ^ right;
    if (lane == 0 && is_first) row->tag = mark.was_rejected ? ~right : right;
    return;
  }
  const unsigned different = __ballot_sync(~0u, lane < count && digest != (stored ^ right));
  if (!is_first) {
    if (different == 0) return;
    mark = read_mark(a, i);
  }
  auto* const states = reinterpret_cast<volatile uint8_t*>(a.states);
  if (a.task == DigestTask::kCompareAgain && mark.was_rejected) {
    if (lane == 0) row->tag = ~right;
    return;
  }
  if (a.task == DigestTask::kCompare && (a.stores[i] == 0 || mark.tag == ~right)) {
    if (lane == 0) states[i] = static_cast<uint8_t>(SlotState::kRefused);
    return;
  }
  const bool is_bad =
      a.task == DigestTask::kCompare && is_first && (mark.was_rejected || mark.tag != right);
  if (different == 0 && !is_bad) return;
  if (lane == (different != 0 ? __ffs(different) - 1 : 0)) {
    // Of several tiles the last one stays: both numbers are written at once.
    const ulonglong2 mismatch{first + lane, digest};
    *reinterpret_cast<ulonglong2*>(&row->tile) = mismatch;
    if (a.task == DigestTask::kCompareAgain) row->tag = ~right;
    states[i] = static_cast<uint8_t>(a.task == DigestTask::kCompare ? SlotState::kCorrupted
                                                                    : SlotState::kOverwritten);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * kWarps)
    kvswap_digest(const __grid_constant__ DigestArguments a) {
  __shared__ uint4 keys[kDigestKeys / 4];
  // Of the turn before, too: warp 0 may not have read those yet.
  __shared__ uint64_t digests[2][kWarps];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (uint32_t i = threadIdx.x; i < kDigestKeys; i += blockDim.x) {
    reinterpret_cast<uint32_t*>(keys)[i] = digest_key(i);
  }
  __syncthreads();
  const uint32_t groups = (a.tile_count + kWarps - 1) / kWarps;
  unsigned turn = 0;
  for (uint32_t number = blockIdx.x; number < a.block_count * groups;
       number += gridDim.x, turn ^= 1) {
    const uint32_t i = number / groups, from = kWarps * (number % groups);
    const uint32_t first = a.first_tile + from, count = min(kWarps, a.tile_count - from);
    // On their way over the link meanwhile.
    uint64_t stored = 0;
    Mark mark;
    if (warp == 0) {
      if (a.task != DigestTask::kWrite && lane < count) {
        SlotDigests* const row = digests_at(a.rows, a.row_stride, a.slots[i]);
        stored = reinterpret_cast<const volatile uint64_t*>(digests_behind(row))[first + lane];
      }
      if (from == 0) mark = read_mark(a, i);
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
      finish_tiles(a, i, first, count, digest, stored, mark, lane);
    }
  }
}

}  // namespace kvswap
