#include "kernels/bulk_copy.h"
#include "kernels/checksum_device.h"

// The kernels that checksum blocks where they are, or on their way, found by their names in the
// module that setup.py makes of this file. csrc/encoding/checksum.cpp does the same on the CPU.
namespace kvswap {
namespace {

// A tile in the memory of the GPU.
template <bool kAligned>
struct GlobalTile {
  const unsigned char* tile;
  uint32_t bytes;

  __device__ uint4 operator()(uint32_t offset) const {
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
};

// What is to be done for blocks[i] whatever its checksums are. By one thread.
__device__ void finish_block(const ChecksumArguments& a, uint32_t i) {
  const ChecksumRow row(a, i);
  if (a.task == ChecksumTask::kWrite) {
    row.end_store(/*is_rejected=*/false);
  } else {
    row.compare_tag(/*is_rejected=*/false);
  }
}

// What one warp does with the checksums of tiles of blocks[i]: see ChecksumRow.
__device__ void finish_tiles(const ChecksumArguments& a, uint32_t i, bool has_tile, uint32_t tile,
                             uint64_t checksum, uint64_t stored) {
  const ChecksumRow row(a, i);
  if (a.task == ChecksumTask::kWrite) {
    row.write(has_tile, tile, checksum);
  } else {
    row.compare(has_tile, tile, checksum, stored);
  }
}

}  // namespace

// In both kernels the first CTA sees to the blocks, the others to the tiles. Reads over the link of
// one sector wait for each other, 0.4 us each: the CTAs of the tiles would all wait for the tags
// and states.

extern "C" __global__ void __launch_bounds__(32 * kChecksumWarps)
    kvswap_checksum(const __grid_constant__ ChecksumArguments a) {
  constexpr uint32_t kWarps = kChecksumWarps;
  // Of the turn before, too: warp 0 may not have read those yet.
  __shared__ uint64_t checksums[2][kWarps];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (blockIdx.x == 0) {
    for (uint32_t i = threadIdx.x; i < a.block_count; i += blockDim.x) finish_block(a, i);
    return;
  }
  const uint32_t groups = (a.tile_count + kWarps - 1) / kWarps;
  unsigned turn = 0;
  for (uint32_t number = blockIdx.x - 1; number < a.block_count * groups;
       number += gridDim.x - 1, turn ^= 1) {
    const uint32_t i = number / groups, from = kWarps * (number % groups);
    const uint32_t first = a.first_tile + from, count = min(kWarps, a.tile_count - from);
    // On its way over the link while the tiles are read.
    uint64_t stored = 0;
    if (warp == 0 && lane < count && a.task != ChecksumTask::kWrite) {
      stored = ChecksumRow(a, i).stored(first + lane);
    }
    if (warp < count) {
      const ChecksumTile tile = reinterpret_cast<const ChecksumTile*>(a.tiles)[first + warp];
      const auto* const at = reinterpret_cast<const unsigned char*>(
          tile.base + static_cast<uint64_t>(a.blocks[i]) * tile.stride);
      const auto bytes = static_cast<uint32_t>(tile.bytes);
      const uint32_t units = checksum_units(bytes);
      const ChecksumSums sums = a.word_bytes == 16
                                    ? sums_of(0, units, lane, GlobalTile<true>{at, bytes})
                                    : sums_of(0, units, lane, GlobalTile<false>{at, bytes});
      if (lane == 0) checksums[turn][warp] = checksum_of(sums, first + warp);
    }
    __syncthreads();
    if (warp == 0) {
      finish_tiles(a, i, lane < count, first + lane, checksums[turn][lane % kWarps], stored);
    }
  }
}

// Copies blocks as kvswap_pack_bulk does, and checksums them in shared memory. Addresses and sizes
// are multiples of 16 bytes. Dynamic shared memory: stage_bytes for each stage of each warp.
extern "C" __global__ void __launch_bounds__(32 * kChecksumCopyWarps)
    kvswap_checksum_copy(const __grid_constant__ ChecksumArguments a) {
#if __CUDA_ARCH__ >= 900
  constexpr uint32_t kWarps = kChecksumCopyWarps, kStages = kChecksumCopyStages;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ uint64_t barriers[kWarps][kStages];
  __shared__ StoredChecksums::Buffers buffers[kWarps];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (blockIdx.x == 0) {
    for (uint32_t i = threadIdx.x; i < a.block_count; i += blockDim.x) {
      if (ends_block(a, i)) finish_block(a, i);
    }
    return;
  }
  unsigned char* const stages = memory + warp * kStages * a.stage_bytes;
  if (lane == 0) {
    for (uint32_t s = 0; s < kStages; ++s) init_barrier(shared_address(&barriers[warp][s]));
  }
  publish_barriers();
  StoredChecksums stored(&buffers[warp], lane);
  __syncwarp();

  const bool is_store = a.task == ChecksumTask::kWrite;
  const auto load = [&](uint32_t stage, const ChecksumCopy& copy) {
    if (lane != 0 || copy.is_empty()) return;
    const unsigned to = shared_address(stages + stage * a.stage_bytes);
    const unsigned barrier = shared_address(&barriers[warp][stage]);
    wait_for_reads<kStages - 2>();  // what was stored from this stage has left it
    // A tile that is checksummed is loaded from its begin on. What of it was unpacked by the launch
    // before is in the cache.
    const uint32_t begin = copy.is_checksummed() ? 0 : copy.from;
    begin_load(copy.to - begin, barrier);
    if (is_store) {
      load_part(to + begin, copy.paged + begin, copy.to - begin, barrier);
    } else {
      if (begin < copy.from) load_part(to, copy.paged, copy.from, barrier);
      load_part(to + copy.from, copy.packed + copy.from, copy.to - copy.from, barrier);
    }
  };

  // A warp takes runs of tiles of one block, so that it reads and writes their checksums at once.
  const uint32_t warps = kWarps * (gridDim.x - 1);
  const uint32_t run_tiles =
      max(1u, min(StoredChecksums::kMost, a.block_count * a.tile_count / warps));
  const uint32_t runs = (a.tile_count + run_tiles - 1) / run_tiles, total = a.block_count * runs;
  const auto fetch = [&](uint32_t run) {
    if (is_store || run >= total) return;
    const uint32_t first = run_tiles * (run % runs);
    stored.fetch(ChecksumRow(a, run / runs), a.first_tile + first,
                 min(run_tiles, a.tile_count - first));
  };
  uint32_t number = kWarps * (blockIdx.x - 1) + warp;
  if (number >= total) return;
  ChecksumCopy copy = checksum_copy(a, number / runs, run_tiles * (number % runs));
  uint32_t stage = 0;
  unsigned parities = 0;  // a bit for each stage
  fetch(number);
  load(stage, copy);
  for (; number < total; number += warps) {
    const uint32_t i = number / runs, first = run_tiles * (number % runs);
    const uint32_t count = min(run_tiles, a.tile_count - first), tile = a.first_tile + first;
    fetch(number + warps);
    bool has_tile = false;
    uint64_t checksum = 0;
    for (uint32_t k = 0; k < count; ++k) {
      const bool is_last = k + 1 == count, is_end = is_last && number + warps >= total;
      const uint32_t following = is_last ? number + warps : number;
      const ChecksumCopy next =
          is_end ? ChecksumCopy{}
                 : checksum_copy(a, following / runs,
                                 is_last ? run_tiles * (following % runs) : first + k + 1);
      const uint32_t next_stage = stage + 1 == kStages ? 0 : stage + 1;
      load(next_stage, next);
      if (!copy.is_empty()) {
        const unsigned char* const at = stages + stage * a.stage_bytes;
        wait_for_load(shared_address(&barriers[warp][stage]), parities >> stage & 1);
        parities ^= 1u << stage;
        if (lane == 0) {
          store_bulk((is_store ? copy.packed : copy.paged) + copy.from,
                     shared_address(at + copy.from), copy.to - copy.from);
        }
        if (copy.is_checksummed()) {
          const ChecksumSums sums =
              sums_of(0, checksum_units(copy.bytes), lane, SharedTile{at, copy.bytes});
          const uint64_t of_tile = __shfl_sync(~0u, checksum_of(sums, tile + k), 0);
          if (lane == k) {
            has_tile = true;
            checksum = of_tile;
          }
        }
      }
      if (lane == 0) commit_stores();  // a group in every turn: load() counts them
      __syncwarp();
      copy = next;
      stage = next_stage;
    }
    const ChecksumRow row(a, i);
    if (is_store) {
      row.write(has_tile, tile + lane, checksum);
    } else {
      row.compare(has_tile, tile + lane, checksum, stored.get(row, tile, has_tile));
    }
  }
  if (lane == 0) wait_for_stores();
#else
  static_cast<void>(a);
  __trap();
#endif
}

}  // namespace kvswap
