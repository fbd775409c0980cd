#pragma once

#include <cstdint>

#include "kernels/bulk_copy.h"
#include "kernels/checksum_arguments.h"
#include "kernels/slot.h"

// What the kernels that make checksums share. Read by nvcc only.
namespace kvswap {

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

__device__ inline void add_products(uint64_t& sum, const uint4& a, const uint4& b,
                                    const uint4& key_a, const uint4& key_b) {
  sum += uint64_t{a.x + key_a.x} * (b.x + key_b.x);
  sum += uint64_t{a.y + key_a.y} * (b.y + key_b.y);
  sum += uint64_t{a.z + key_a.z} * (b.z + key_b.z);
  sum += uint64_t{a.w + key_a.w} * (b.w + key_b.w);
}

// The sums over units [first, last) of a tile, by all threads of a warp; the first one has them.
// vector_at(offset): 16 bytes of the tile, zeros behind its end.
template <typename VectorAt>
__device__ ChecksumSums sums_of(uint32_t first, uint32_t last, unsigned lane,
                                const VectorAt& vector_at) {
  ChecksumSums sums;
  const auto* key = reinterpret_cast<const uint4*>(kKeys.words) + first * kChecksumVectors + lane;
  uint4 key_a = __ldg(key), key_b = __ldg(key + kChecksumHalf);
#pragma unroll 4
  for (uint32_t unit = first; unit < last; ++unit) {
    const uint4 a = vector_at(unit * kChecksumUnitBytes + 16 * lane);
    const uint4 b = vector_at(unit * kChecksumUnitBytes + 16 * (lane + kChecksumHalf));
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

__device__ inline uint32_t checksum_units(uint32_t bytes) {
  return (bytes + kChecksumUnitBytes - 1) / kChecksumUnitBytes;
}

// Of a tile in shared memory, of so many bytes.
struct SharedTile {
  const unsigned char* tile;
  uint32_t bytes;

  __device__ uint4 operator()(uint32_t offset) const {
    if (offset >= bytes) return {0, 0, 0, 0};
    return *reinterpret_cast<const uint4*>(tile + offset);
  }
};

// The row of blocks[i] of a launch, and what becomes of its state. Another store, or another
// process, may be writing to the row: all reads are of memory.
struct ChecksumRow {
  SlotChecksums* row;
  uint64_t store, right;  // right: the tag
  volatile uint8_t* state;

  template <typename Arguments>
  __device__ ChecksumRow(const Arguments& a, uint32_t i)
      : row(checksums_at(a.rows, a.row_stride, a.slots[i])),
        store(a.stores[i]),
        right(checksum_tag(a.slots[i], store)),
        state(reinterpret_cast<volatile uint8_t*>(a.states) + i) {}

  __device__ uint64_t tag() const { return *reinterpret_cast<const volatile uint64_t*>(&row->tag); }
  __device__ uint64_t stored(uint32_t tile) const {
    return reinterpret_cast<const volatile uint64_t*>(checksums_behind(row))[tile];
  }
  __device__ void set_state(SlotState to) const { *state = static_cast<uint8_t>(to); }
  // Of several tiles the last one stays: both numbers are written at once.
  __device__ void report(uint64_t tile, uint64_t checksum) const {
    const ulonglong2 mismatch{tile, checksum};
    *reinterpret_cast<ulonglong2*>(&row->tile) = mismatch;
  }

  // By one thread, once for a block that is stored.
  __device__ void end_store(bool is_rejected) const { row->tag = is_rejected ? ~right : right; }
  // By one thread, for a block that is loaded, whatever its checksums are.
  __device__ void compare_tag(bool is_rejected) const {
    const uint64_t found = tag();
    if (store == 0 || found == ~right) {
      set_state(SlotState::kRefused);
    } else if (is_rejected || found != right) {
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
    if (store == 0 || tag() == ~right) return;  // compare_tag() refuses it
    report(tile, checksum);
    set_state(SlotState::kCorrupted);
  }
};

// The checksums of slots, that a warp fetches over the link one run of tiles ahead. By bulk copies:
// a thread's own load over the link holds up all loads of its multiprocessor, those of other
// kernels too.
class StoredChecksums {
 public:
  static constexpr uint32_t kMost = 8;  // of a run
  // In shared memory, of each warp that fetches.
  struct Buffers {
    alignas(16) uint64_t checksums[2][kMost + 2];  // from an even tile on
    uint64_t barriers[2];
  };

  __device__ StoredChecksums(Buffers* buffers, unsigned lane) : buffers_(buffers), lane_(lane) {
#if __CUDA_ARCH__ >= 900
    if (lane != 0) return;
    for (uint64_t& barrier : buffers->barriers) init_barrier(shared_address(&barrier));
    publish_barriers();
#endif
  }
  // By all threads of the warp, like get(). At most two runs are fetched before get().
  __device__ void fetch(const ChecksumRow& row, uint32_t first, uint32_t count) {
#if __CUDA_ARCH__ >= 900
    if (lane_ == 0) {
      const uint32_t begin = first & ~1u, end = (first + count + 1) & ~1u;
      const unsigned bytes = (end - begin) * static_cast<unsigned>(sizeof(uint64_t));
      const unsigned barrier = shared_address(&buffers_->barriers[fetched_ & 1]);
      load_bulk(shared_address(buffers_->checksums[fetched_ & 1]),
                reinterpret_cast<uint64_t>(checksums_behind(row.row) + begin), bytes, barrier);
    }
    ++fetched_;
#endif
  }
  // Of the run that was fetched first, which begins with tile `first`: thread t gets that of tile
  // first + t, if it has that tile.
  __device__ uint64_t get(const ChecksumRow& row, uint32_t first, bool has_tile) {
    uint64_t checksum = 0;
#if __CUDA_ARCH__ >= 900
    wait_for_load(shared_address(&buffers_->barriers[used_ & 1]), used_ >> 1 & 1);
    if (has_tile) checksum = buffers_->checksums[used_ & 1][(first & 1) + lane_];
    ++used_;
    __syncwarp();
#else
    if (has_tile) checksum = row.stored(first + lane_);
#endif
    return checksum;
  }

 private:
  Buffers* buffers_;
  unsigned lane_, fetched_ = 0, used_ = 0;
};

}  // namespace kvswap
