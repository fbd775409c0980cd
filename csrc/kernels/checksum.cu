#include "kernels/bulk_copy.h"
#include "kernels/checksum_arguments.h"
#include "kernels/slot.h"

// The kernel that checksums blocks on the GPU, before which they were copied, found by its name in
// the module that setup.py makes of this file. csrc/encoding/checksum.cpp does the same on the CPU.
namespace kvswap {
namespace {

constexpr uint32_t kChecksumVectors = kChecksumUnitBytes / 16, kChecksumHalf = kChecksumVectors / 2;
static_assert(kChecksumHalf == 32, "a thread has a vector of each half of a unit");

struct ChecksumKeys {
  alignas(16) uint32_t words[kChecksumKeys];
};
constexpr ChecksumKeys make_checksum_keys() {
  ChecksumKeys keys{};
  for (uint32_t i = 0; i < kChecksumKeys; ++i) keys.words[i] = checksum_key(i);
  return keys;
}
__device__ const ChecksumKeys kKeys = make_checksum_keys();

__device__ void add_products(uint64_t& sum, const uint4& a, const uint4& b, const uint4& key_a,
                             const uint4& key_b) {
  sum += uint64_t{a.x + key_a.x} * (b.x + key_b.x);
  sum += uint64_t{a.y + key_a.y} * (b.y + key_b.y);
  sum += uint64_t{a.z + key_a.z} * (b.z + key_b.z);
  sum += uint64_t{a.w + key_a.w} * (b.w + key_b.w);
}

// A tile in the memory of the GPU.
template <bool kAligned>
struct Tile {
  const unsigned char* begin;
  uint32_t bytes;

  // 16 bytes, zeros behind the end.
  __device__ uint4 vector_at(uint32_t offset) const {
    uint4 vector{0, 0, 0, 0};
    if (kAligned) {
      if (offset < bytes) vector = __ldcg(reinterpret_cast<const uint4*>(begin + offset));
    } else {
      auto* const to = reinterpret_cast<unsigned char*>(&vector);
#pragma unroll
      for (uint32_t i = 0; i < 16; ++i) {
        if (offset + i < bytes) to[i] = __ldcg(begin + offset + i);
      }
    }
    return vector;
  }
};

// The sums over a tile, by all threads of a warp; the first one has them.
template <bool kAligned>
__device__ ChecksumSums sums_of(const Tile<kAligned>& tile, unsigned lane) {
  ChecksumSums sums;
  const auto* key = reinterpret_cast<const uint4*>(kKeys.words) + lane;
  uint4 key_a = __ldg(key), key_b = __ldg(key + kChecksumHalf);
#pragma unroll 4
  for (uint32_t unit = 0; unit < tile.bytes; unit += kChecksumUnitBytes) {
    const uint4 a = tile.vector_at(unit + 16 * lane);
    const uint4 b = tile.vector_at(unit + 16 * (lane + kChecksumHalf));
    key += kChecksumVectors;
    const uint4 next_a = __ldg(key), next_b = __ldg(key + kChecksumHalf);
    add_products(sums.first, a, b, key_a, key_b);
    add_products(sums.second, a, b, next_a, next_b);
    key_a = next_a;
    key_b = next_b;
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    sums.first += __shfl_down_sync(~0u, sums.first, distance);
    sums.second += __shfl_down_sync(~0u, sums.second, distance);
  }
  return sums;
}

// The row of blocks[i] of a launch, and what becomes of its state. Another store, or another
// process, may be writing to the row: all reads are of memory.
struct ChecksumRow {
  SlotChecksums* row;
  uint64_t store, right;  // right: the tag
  volatile uint8_t* state;

  __device__ ChecksumRow(const ChecksumArguments& a, uint32_t i)
      : row(checksums_at(a.rows, a.row_stride, a.slots[i])),
        store(a.stores[i]),
        right(checksum_tag(a.slots[i], store)),
        state(reinterpret_cast<volatile uint8_t*>(a.states) + i) {}

  __device__ uint64_t tag() const { return *reinterpret_cast<const volatile uint64_t*>(&row->tag); }
  __device__ void set_state(SlotState to) const { *state = static_cast<uint8_t>(to); }
  // Of several tiles the last one stays: both numbers are written at once.
  __device__ void report(uint64_t tile, uint64_t checksum) const {
    const ulonglong2 mismatch{tile, checksum};
    *reinterpret_cast<ulonglong2*>(&row->tile) = mismatch;
  }

  // Whatever the checksums are. By one thread.
  __device__ void finish(ChecksumTask task) const {
    // By the copy. Another CTA may be writing that it is corrupted, which stays.
    const auto found = static_cast<SlotState>(*state);
    const bool is_rejected = found == SlotState::kOverflow || found == SlotState::kRefused;
    if (task == ChecksumTask::kWrite) {
      row->tag = is_rejected ? ~right : right;
      return;
    }
    const uint64_t found_tag = tag();
    if (store == 0 || found_tag == ~right) {
      set_state(SlotState::kRefused);
    } else if (is_rejected || found_tag != right) {
      report(kNoTile, 0);
      set_state(SlotState::kCorrupted);
    }
  }
  // By all threads of a warp. With has_tile, a thread has the checksum of this tile. stored: that
  // of the slot.
  __device__ void write(bool has_tile, uint32_t tile, uint64_t checksum) const {
    if (has_tile) checksums_behind(row)[tile] = checksum ^ right;
  }
  __device__ void compare(bool has_tile, uint32_t tile, uint64_t checksum, uint64_t stored) const {
    const unsigned different = __ballot_sync(~0u, has_tile && checksum != (stored ^ right));
    // Reported by the first thread whose checksum is another one.
    if (threadIdx.x % 32 + 1 != static_cast<unsigned>(__ffs(different))) return;
    if (store == 0 || tag() == ~right) return;  // finish() refuses it
    report(tile, checksum);
    set_state(SlotState::kCorrupted);
  }
};

// The checksums of slots, that a warp fetches over the link, those of a turn while it works on the
// turn before. With bulk copies: a thread's own load over the link holds up all loads of its
// multiprocessor, those of other kernels too.
class StoredChecksums {
 public:
  // In shared memory.
  struct Buffers {
    alignas(16) uint64_t checksums[2][kChecksumWarps + 2];  // from an even tile on
    uint64_t barriers[2];
  };

  __device__ StoredChecksums(Buffers& buffers, unsigned lane) : buffers_(buffers), lane_(lane) {
#if __CUDA_ARCH__ >= 900
    if (lane != 0) return;
    for (uint64_t& barrier : buffers.barriers) init_barrier(shared_address(&barrier));
    publish_barriers();
#endif
  }
  // By all threads of the warp, like get().
  __device__ void fetch(const ChecksumRow& row, uint32_t first, uint32_t count) {
#if __CUDA_ARCH__ >= 900
    if (lane_ == 0) {
      const uint32_t begin = first & ~1u, end = (first + count + 1) & ~1u;
      const unsigned bytes = (end - begin) * static_cast<unsigned>(sizeof(uint64_t));
      load_bulk(shared_address(buffers_.checksums[fetched_ & 1]),
                reinterpret_cast<uint64_t>(checksums_behind(row.row) + begin), bytes,
                shared_address(&buffers_.barriers[fetched_ & 1]));
    }
#else
    const volatile uint64_t* const checksums = checksums_behind(row.row);
    const uint64_t own = lane_ < count ? checksums[first + lane_] : 0;
    even_ = (fetched_ & 1) == 0 ? own : even_;
    odd_ = (fetched_ & 1) == 0 ? odd_ : own;
#endif
    ++fetched_;
  }
  // Of the turn that was fetched first: thread t gets that of tile first + t, if it has that tile.
  __device__ uint64_t get(uint32_t first, bool has_tile) {
    uint64_t checksum = 0;
#if __CUDA_ARCH__ >= 900
    wait_for_load(shared_address(&buffers_.barriers[used_ & 1]), used_ >> 1 & 1);
    if (has_tile) checksum = buffers_.checksums[used_ & 1][(first & 1) + lane_];
    __syncwarp();
#else
    checksum = (used_ & 1) == 0 ? even_ : odd_;
#endif
    ++used_;
    return checksum;
  }

 private:
  Buffers& buffers_;
  unsigned lane_, fetched_ = 0, used_ = 0;
#if __CUDA_ARCH__ < 900
  uint64_t even_ = 0, odd_ = 0;
#endif
};

}  // namespace

// The first CTA sees to the blocks, the others to the tiles. Reads over the link of one sector wait
// for each other, 0.4 us each: the CTAs of the tiles would all wait for the tags and states.
extern "C" __global__ void __launch_bounds__(32 * kChecksumWarps)
    kvswap_checksum(const __grid_constant__ ChecksumArguments a) {
  constexpr uint32_t kWarps = kChecksumWarps;
  // Of the turn before, too: warp 0 may not have read those yet.
  __shared__ uint64_t checksums[2][kWarps];
  __shared__ StoredChecksums::Buffers buffers;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (blockIdx.x == 0) {
    for (uint32_t i = threadIdx.x; i < a.block_count; i += blockDim.x) {
      ChecksumRow(a, i).finish(a.task);
    }
    return;
  }
  const bool compares = a.task == ChecksumTask::kCompare;
  const uint32_t groups = (a.tile_count + kWarps - 1) / kWarps, total = a.block_count * groups;
  StoredChecksums stored(buffers, threadIdx.x);
  const auto fetch = [&](uint32_t number) {
    if (warp != 0 || !compares || number >= total) return;
    const uint32_t from = kWarps * (number % groups);
    stored.fetch(ChecksumRow(a, number / groups), a.first_tile + from,
                 min(kWarps, a.tile_count - from));
  };
  fetch(blockIdx.x - 1);
  unsigned turn = 0;
  for (uint32_t number = blockIdx.x - 1; number < total; number += gridDim.x - 1, turn ^= 1) {
    const uint32_t i = number / groups, from = kWarps * (number % groups);
    const uint32_t first = a.first_tile + from, count = min(kWarps, a.tile_count - from);
    fetch(number + gridDim.x - 1);
    if (warp < count) {
      const ChecksumTile tile = reinterpret_cast<const ChecksumTile*>(a.tiles)[first + warp];
      const auto* const at = reinterpret_cast<const unsigned char*>(
          tile.base + static_cast<uint64_t>(a.blocks[i]) * tile.stride);
      const auto bytes = static_cast<uint32_t>(tile.bytes);
      const ChecksumSums sums = a.word_bytes == 16 ? sums_of(Tile<true>{at, bytes}, lane)
                                                   : sums_of(Tile<false>{at, bytes}, lane);
      if (lane == 0) checksums[turn][warp] = checksum_of(sums, first + warp);
    }
    __syncthreads();
    if (warp == 0) {
      const ChecksumRow row(a, i);
      const bool has_tile = lane < count;
      const uint64_t checksum = checksums[turn][lane % kWarps];
      if (compares) {
        row.compare(has_tile, first + lane, checksum, stored.get(first, has_tile));
      } else {
        row.write(has_tile, first + lane, checksum);
      }
    }
  }
}

}  // namespace kvswap
