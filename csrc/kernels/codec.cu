#include "kernels/bulk_copy.h"
#include "kernels/slot.h"

// The kernels that encode blocks into slots and decode them, found by their names in the module
// that setup.py makes of this file. codec.cpp does the same on the CPU, and says more about the
// arithmetic.
namespace kvswap {

// Older GPUs than Ampere lack cp.async and sums over warps.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
namespace {

// A team of 1, 2, 4 or 8 warps works on one tile at a time. It has the tile in one of its stages,
// in shared memory, while the next tile arrives in another one and the last one leaves.
constexpr int kStages = kCodecStages;
constexpr int kVectors = 8;  // of 16 bytes, that a thread has of the largest tile of its team
static_assert(kVectors * 16 * 32 == kCodecWarpBytes);

// The place of a thread in its team, and of the team in the grid.
template <int kWarps>
struct Team {
  static constexpr unsigned kThreads = 32 * kWarps;
  unsigned lane = threadIdx.x % 32, rank = threadIdx.x % kThreads, number = threadIdx.x / kThreads;
  unsigned per_cta = blockDim.x / kThreads;

  __device__ void sync() const {
    if (kWarps == 1) {
      __syncwarp();
    } else {  // barrier 0 is that of __syncthreads()
      asm volatile("bar.sync %0, %1;" ::"r"(number + 1), "n"(kThreads) : "memory");
    }
  }
};

// What a team works on: tile `tile` of blocks[index].
struct Work {
  uint32_t index, tile, bytes;
  unsigned char *values, *encoded, *slot;

  // number: of block_count * tile_count.
  __device__ Work(const CodecArguments& a, uint32_t number) {
    index = number / a.tile_count;
    tile = a.first_tile + number % a.tile_count;
    const SlotTile found = reinterpret_cast<const SlotTile*>(a.tiles)[tile];
    bytes = found.bytes;
    const uint64_t place = a.by_slot != 0 ? static_cast<uint64_t>(a.slots[index]) : index;
    slot = reinterpret_cast<unsigned char*>(a.packed + place * a.packed_stride);
    encoded = slot + (found.offset - a.skipped);
    values =
        reinterpret_cast<unsigned char*>(found.base + uint64_t(a.blocks[index]) * found.stride);
  }
  __device__ SlotEntry* entry() const {
    return reinterpret_cast<SlotEntry*>(slot + kEntriesOffset) + tile;
  }
  __device__ uint16_t* places(const CodecArguments& a) const {
    return reinterpret_cast<uint16_t*>(slot + places_offset(a.all_tiles));
  }
  __device__ uint8_t* exponents(const CodecArguments& a) const {
    return slot + exponents_offset(a.all_tiles, a.max_escapes);
  }
  __device__ void set_state(const CodecArguments& a, SlotState state) const {
    reinterpret_cast<volatile uint8_t*>(a.states)[index] = static_cast<uint8_t>(state);
  }
};

// The stages of a team. In each turn of its loop the team loads the tile of the next turn, waits
// for that of this turn, works on it in place, and stores it.
#if __CUDA_ARCH__ >= 900
// With bulk copies, which one thread of the team starts.
template <int kWarps>
class Stages {
 public:
  __device__ Stages(const Team<kWarps>& team, unsigned char* memory)
      : team_(team), memory_(memory) {
    __shared__ uint64_t barriers[kCodecMaxWarps][kStages];
    barriers_ = barriers[team.number];
    if (team.rank == 0) {
      for (int i = 0; i < kStages; ++i) init_barrier(shared_address(&barriers_[i]));
    }
    publish_barriers();
  }
  __device__ unsigned char* current() const { return memory_ + stage_ * kBytes; }

  // bytes: 0 for nothing.
  __device__ void load_first(const unsigned char* from, uint32_t bytes) { load(0, from, bytes); }
  __device__ void load_next(const unsigned char* from, uint32_t bytes) {
    load(stage_ + 1 == kStages ? 0 : stage_ + 1, from, bytes);
  }
  __device__ void wait() const { wait_for_load(shared_address(&barriers_[stage_]), parity_); }
  // After each thread has written its part of the stage. bytes: 0 for nothing.
  __device__ void store(unsigned char* to, uint32_t bytes) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    team_.sync();
    if (team_.rank == 0) {
      if (bytes != 0) {
        store_bulk(reinterpret_cast<uint64_t>(to), shared_address(current()), bytes);
      }
      commit_stores();  // a group in every turn: load() counts them
    }
    if (++stage_ == kStages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }
  __device__ void finish() const {
    if (team_.rank == 0) wait_for_stores();
  }

 private:
  static constexpr unsigned kBytes = kWarps * kCodecWarpBytes;

  __device__ void load(int stage, const unsigned char* from, uint32_t bytes) {
    if (team_.rank != 0 || bytes == 0) return;
    // What was stored from this stage has left it: all groups but those of the turns since.
    wait_for_reads<kStages - 2>();
    load_bulk(shared_address(memory_ + stage * kBytes), reinterpret_cast<uint64_t>(from), bytes,
              shared_address(&barriers_[stage]));
  }

  const Team<kWarps>& team_;
  unsigned char* memory_;
  uint64_t* barriers_;
  int stage_ = 0;
  unsigned parity_ = 0;
};
#else
// For GPUs before Hopper: each thread copies vectors of 16 bytes.
template <int kWarps>
class Stages {
 public:
  __device__ Stages(const Team<kWarps>& team, unsigned char* memory)
      : team_(team), memory_(memory) {}
  __device__ unsigned char* current() const { return memory_ + stage_ * kBytes; }

  __device__ void load_first(const unsigned char* from, uint32_t bytes) { load(0, from, bytes); }
  __device__ void load_next(const unsigned char* from, uint32_t bytes) {
    load(stage_ + 1 == kStages ? 0 : stage_ + 1, from, bytes);
  }
  __device__ void wait() const {
    asm volatile("cp.async.wait_group 1;" ::: "memory");  // all but that of the next turn
    team_.sync();
  }
  __device__ void store(unsigned char* to, uint32_t bytes) {
    team_.sync();
    for (uint32_t at = 16 * team_.rank; at < bytes; at += 16 * Team<kWarps>::kThreads) {
      *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(current() + at);
    }
    if (++stage_ == kStages) stage_ = 0;
  }
  __device__ void finish() const {}

 private:
  static constexpr unsigned kBytes = kWarps * kCodecWarpBytes;

  // The team has met since it stored from this stage, two turns ago.
  __device__ void load(int stage, const unsigned char* from, uint32_t bytes) {
    const unsigned to = shared_address(memory_ + stage * kBytes);
    for (uint32_t at = 16 * team_.rank; at < bytes; at += 16 * Team<kWarps>::kThreads) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + at), "l"(from + at)
                   : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  const Team<kWarps>& team_;
  unsigned char* memory_;
  int stage_ = 0;
};
#endif

// Pairs of values, or of what belongs to them, in the halves of a word. kOnes * x: x in both.
constexpr uint32_t kOnes = 0x00010001;
__device__ uint32_t exponents_of(uint32_t pair) { return pair >> 7 & (0xff * kOnes); }
// min(a + b, limit) of both halves, each with 16 bits.
__device__ uint32_t add_min(uint32_t a, uint32_t b, uint32_t limit) {
  return __viaddmin_u16x2(a, b, limit);
}
// The lower bits of 8 values in 4 pairs, 4 bits each, in the order of value_of_code().
__device__ uint32_t gather(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return a + (b << 4) + (c << 8) + (d << 12);
}

struct EncodedVector {
  uint2 signs;     // with the mantissas
  uint32_t codes;  // of 4 bits
};

// Encodes 8 values. Returns bit 4 * c if code number c is an escape.
__device__ uint32_t encode(const uint4& values, uint32_t lowest, EncodedVector& encoded) {
  const uint32_t e0 = exponents_of(values.x), e1 = exponents_of(values.y),
                 e2 = exponents_of(values.z), e3 = exponents_of(values.w);
  const uint32_t minus = (0x10000 - lowest) * kOnes, outside = kWindow * kOnes;
  const uint32_t above = gather(add_min(e0, minus, outside), add_min(e1, minus, outside),
                                add_min(e2, minus, outside), add_min(e3, minus, outside));
  const auto split = [](uint32_t a, uint32_t b) {
    return (__byte_perm(a, b, 0x6420) & 0x7f7f7f7f) | (__byte_perm(a, b, 0x7531) & 0x80808080);
  };
  encoded.signs = {split(values.x, values.y), split(values.z, values.w)};
  encoded.codes = ((above & 0x77777777) + 0x11111111) ^ (above & 0x88888888);  // 15 + 1 is 0
  const uint32_t twos = above & above >> 1;
  uint32_t escapes = twos & twos >> 2 & 0x11111111;  // 15
  if (escapes != 0) {                                // or exponent 0
    escapes &= gather(add_min(e0, 0, kOnes), add_min(e1, 0, kOnes), add_min(e2, 0, kOnes),
                      add_min(e3, 0, kOnes));
  }
  return escapes;
}

__device__ uint4 decode(const EncodedVector& encoded, uint32_t lowest) {
  // signs: each byte twice. codes: of the two values, with others above.
  const uint32_t first = (lowest - 1) * kOnes;
  const auto join = [&](uint32_t signs, uint32_t codes) {
    codes &= 0xf * kOnes;
    return (signs & 0x807f * kOnes) | add_min(codes, first, codes << 8) << 7;  // code 0 stays 0
  };
  const uint2 signs = encoded.signs;
  return {join(__byte_perm(signs.x, 0, 0x1100), encoded.codes),
          join(__byte_perm(signs.x, 0, 0x3322), encoded.codes >> 4),
          join(__byte_perm(signs.y, 0, 0x1100), encoded.codes >> 8),
          join(__byte_perm(signs.y, 0, 0x3322), encoded.codes >> 12)};
}

// The sum of `value` in this lane and those before it.
__device__ uint32_t sum_up_to(uint32_t value, unsigned lane) {
  for (unsigned distance = 1; distance < 32; distance *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, value, distance);
    if (lane >= distance) value += other;
  }
  return value;
}

// The lowest exponent whose window has most of what is in `bins`; of those, the first one, or the
// next one if its bin is empty. By all threads of a warp, each for 8 exponents.
__device__ uint32_t choose_lowest(const uint32_t* bins, unsigned lane) {
  const uint4 half[2] = {reinterpret_cast<const uint4*>(bins)[2 * lane],
                         reinterpret_cast<const uint4*>(bins)[2 * lane + 1]};
  // Of bins 0 to 8 * lane + i.
  uint32_t sums[8] = {half[0].x, half[0].y, half[0].z, half[0].w,
                      half[1].x, half[1].y, half[1].z, half[1].w};
  uint32_t empty = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    empty |= (sums[i] == 0 ? 1u : 0u) << i;
    if (i > 0) sums[i] += sums[i - 1];
  }
  const uint32_t before = sum_up_to(sums[7], lane) - sums[7];
#pragma unroll
  for (int i = 0; i < 8; ++i) sums[i] += before;
  uint32_t best = 0;  // how many are inside, then which, so that the first one is the largest
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    // Bin 8 * lane + i + 14 belongs to one of the next two lanes.
    const uint32_t end = __shfl_down_sync(~0u, sums[i < 2 ? i + 6 : i - 2], i < 2 ? 1 : 2);
    const uint32_t inside = end - (i > 0 ? sums[i > 0 ? i - 1 : 0] : before);
    const uint32_t lowest = 8 * lane + i;
    if (lowest >= 1 && lowest <= kMaxLowest) {
      best = max(best, inside << 9 | (255 - lowest) << 1 | (empty >> i & 1));
    }
  }
  best = __reduce_max_sync(~0u, best);
  const uint32_t lowest = 255 - (best >> 1 & 255);
  return (best & 1) != 0 && lowest < kMaxLowest ? lowest + 1 : lowest;
}

// Where the escapes of a thread go. Thread after thread, so that they need one atomic a tile.
template <int kWarps>
class EscapeCounter {
 public:
  // counts: shared memory, a word for each warp of the CTA. start: a word for each team.
  __device__ EscapeCounter(const Team<kWarps>& team, uint32_t* counts, uint32_t* start)
      : team_(team), counts_(counts + kWarps * team.number), start_(start + team.number) {}

  // The team meets after this.
  __device__ void count(uint32_t mine) {
    mine_ = mine;
    const uint32_t of_warp = __reduce_add_sync(~0u, mine);
    if (team_.lane == 0) counts_[team_.rank / 32] = of_warp;
  }
  __device__ uint32_t of_tile() const {
    uint32_t sum = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += counts_[warp];
    return sum;
  }
  // Takes a run of the slot for the escapes of the tile, by all threads. Returns its first one.
  __device__ uint32_t take(SlotCounter* counter, uint32_t of_tile) {
    if (team_.rank == 0) *start_ = static_cast<uint32_t>(atomicAdd(counter, of_tile));
    team_.sync();
    return *start_;
  }
  // How many escapes of the tile are those of earlier threads.
  __device__ uint32_t before_mine() const {
    uint32_t before = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      if (warp < team_.rank / 32) before += counts_[warp];
    }
    return before + sum_up_to(mine_, team_.lane) - mine_;
  }

 private:
  const Team<kWarps>& team_;
  uint32_t* counts_;
  uint32_t* start_;
  uint32_t mine_ = 0;
};

// After one thread has counted each finished tile: the last one of a slot writes the header.
__device__ void finish_tile(const CodecArguments& a, const Work& work, SlotCounter* counter) {
  const SlotCounter before = atomicAdd(counter, kFinishedTile);
  if (before / kFinishedTile != a.all_tiles - 1) return;
  const auto escapes = static_cast<uint32_t>(before);
  const bool fits = escapes <= a.max_escapes;
  const SlotHeader header{kSlotMagic, escapes | (fits ? 0 : kSlotOverflow), 0};
  *reinterpret_cast<SlotHeader*>(work.slot) = header;
  if (!fits) work.set_state(a, SlotState::kOverflow);
  *counter = 0;  // for the next launch
}

template <int kWarps>
__device__ void encode_tiles(const CodecArguments& a) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ uint32_t counts[kCodecMaxWarps], starts[kCodecMaxWarps];
  const Team<kWarps> team;
  constexpr unsigned kThreads = Team<kWarps>::kThreads, kStageBytes = kWarps * kCodecWarpBytes;
  Stages<kWarps> stages(team, memory + team.number * kStages * kStageBytes);
  EscapeCounter<kWarps> counter(team, counts, starts);
  auto* const bins = reinterpret_cast<uint32_t*>(memory + team.per_cta * kStages * kStageBytes) +
                     kCodecBins * team.number;
  const auto clear_bins = [&] {
    for (unsigned i = team.rank; i < kCodecBins; i += kThreads) bins[i] = 0;
  };
  clear_bins();
  __syncthreads();

  const uint32_t total = a.block_count * a.tile_count, teams = gridDim.x * team.per_cta;
  uint32_t number = blockIdx.x * team.per_cta + team.number;
  if (number >= total) return;
  Work work(a, number);
  stages.load_first(work.values, work.bytes);
  for (; number < total; number += teams) {
    const bool is_last = number + teams >= total;
    const Work next(a, is_last ? number : number + teams);
    stages.load_next(next.values, is_last ? 0 : next.bytes);
    stages.wait();
    unsigned char* const stage = stages.current();
    const uint32_t vectors = work.bytes / 16;

#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const uint32_t vector = j * kThreads + team.rank;
      if (vector < vectors) {
        const uint32_t pair =
            reinterpret_cast<const uint32_t*>(stage)[4 * vector + sampled_word(vector)];
        atomicAdd(&bins[pair >> 7 & 255], 1);
        atomicAdd(&bins[pair >> 23 & 255], 1);
      }
    }
    team.sync();
    const uint32_t lowest = choose_lowest(bins, team.lane);

    // The tile goes to registers, because its encoded bytes take its place.
    EncodedVector encoded[kVectors];
    uint32_t escapes[kVectors / 4] = {};  // bit 4 * code + j % 4 of escapes[j / 4]
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const uint32_t vector = j * kThreads + team.rank;
      if (vector < vectors) {
        const uint4 values = reinterpret_cast<const uint4*>(stage)[vector];
        escapes[j / 4] |= encode(values, lowest, encoded[j]) << j % 4;
      }
    }
    counter.count(__popc(escapes[0]) + __popc(escapes[1]));
    team.sync();
    clear_bins();

    const uint32_t of_tile = counter.of_tile();
    uint32_t first = 0;
    auto* const slot_counter = reinterpret_cast<SlotCounter*>(a.counters) + work.index;
    if (of_tile != 0) {
      first = counter.take(slot_counter, of_tile);
      if (first + of_tile <= a.max_escapes) {
        uint32_t at = first + counter.before_mine();
#pragma unroll
        for (int part = 0; part < kVectors / 4; ++part) {
          for (uint32_t bits = escapes[part]; bits != 0; bits &= bits - 1, ++at) {
            const uint32_t bit = __ffs(bits) - 1;
            const uint32_t vector = (4 * part + bit % 4) * kThreads + team.rank;
            const uint32_t place = 8 * vector + value_of_code(bit / 4);
            work.places(a)[at] = static_cast<uint16_t>(place);
            work.exponents(a)[at] =
                static_cast<uint8_t>(reinterpret_cast<const uint16_t*>(stage)[place] >> 7);
          }
        }
      }
      team.sync();  // all have read the values of their escapes
    }
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const uint32_t vector = j * kThreads + team.rank;
      if (vector < vectors) {
        reinterpret_cast<uint2*>(stage)[vector] = encoded[j].signs;
        reinterpret_cast<uint32_t*>(stage + work.bytes / 2)[vector] = encoded[j].codes;
      }
    }
    stages.store(work.encoded, encoded_bytes(work.bytes));
    if (team.rank == 0) {
      *work.entry() = {static_cast<uint8_t>(lowest), 0, static_cast<uint16_t>(of_tile), first};
      finish_tile(a, work, slot_counter);
    }
    work = next;
  }
  stages.finish();
}

// The metadata of a tile, read before the tile has arrived.
struct Metadata {
  uint2 header;  // magic and state
  uint2 entry;

  __device__ explicit Metadata(const Work& work)
      : header(*reinterpret_cast<const uint2*>(work.slot)),
        entry(*reinterpret_cast<const uint2*>(work.entry())) {}
  __device__ uint32_t lowest() const { return entry.x & 255; }
  __device__ uint32_t escapes() const { return entry.x >> 16; }
  __device__ uint32_t first_escape() const { return entry.y; }
  __device__ bool is_valid(const CodecArguments& a) const {
    return header.x == kSlotMagic && (header.y & kSlotOverflow) == 0 && lowest() >= 1 &&
           lowest() <= kMaxLowest && first_escape() <= a.max_escapes &&
           escapes() <= a.max_escapes - first_escape();
  }
};

template <int kWarps>
__device__ void decode_tiles(const CodecArguments& a) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ uint32_t escapes_of_team[kCodecMaxWarps];
  const Team<kWarps> team;
  constexpr unsigned kThreads = Team<kWarps>::kThreads;
  Stages<kWarps> stages(team, memory + team.number * kStages * kWarps * kCodecWarpBytes);
  __syncthreads();

  const uint32_t total = a.block_count * a.tile_count, teams = gridDim.x * team.per_cta;
  uint32_t number = blockIdx.x * team.per_cta + team.number;
  if (number >= total) return;
  Work work(a, number);
  stages.load_first(work.encoded, encoded_bytes(work.bytes));
  Metadata metadata(work);
  for (; number < total; number += teams) {
    // The escapes of this tile, and the metadata of the next one, are on their way meanwhile.
    const bool is_valid = metadata.is_valid(a);
    const uint32_t escapes = is_valid ? metadata.escapes() : 0, lowest = metadata.lowest();
    const uint16_t* const places = work.places(a) + metadata.first_escape();
    const uint8_t* const exponents = work.exponents(a) + metadata.first_escape();
    uint32_t place = 0, exponent = 0;
    if (team.rank < escapes) {
      place = places[team.rank];
      exponent = exponents[team.rank];
    }
    const bool is_last = number + teams >= total;
    const Work next(a, is_last ? number : number + teams);
    stages.load_next(next.encoded, is_last ? 0 : encoded_bytes(next.bytes));
    metadata = Metadata(next);
    stages.wait();
    unsigned char* const stage = stages.current();
    const uint32_t vectors = work.bytes / 16;

    EncodedVector encoded[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const uint32_t vector = j * kThreads + team.rank;
      if (vector < vectors) {
        encoded[j] = {reinterpret_cast<const uint2*>(stage)[vector],
                      reinterpret_cast<const uint32_t*>(stage + work.bytes / 2)[vector]};
      }
    }
    if (team.rank == 0) escapes_of_team[team.number] = escapes;
    team.sync();  // all have read the tile, whose values take its place
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const uint32_t vector = j * kThreads + team.rank;
      if (vector < vectors) reinterpret_cast<uint4*>(stage)[vector] = decode(encoded[j], lowest);
    }
    bool is_refused = !is_valid;
    // One thread decides whether the team meets. Each has read the metadata, which another process
    // may be writing to: a team that does not agree would wait here for ever.
    if (escapes_of_team[team.number] != 0) {
      team.sync();
      for (uint32_t i = team.rank; i < escapes; i += kThreads) {
        if (i != team.rank) {
          place = places[i];
          exponent = exponents[i];
        }
        if (place < work.bytes / 2) {
          uint16_t& value = reinterpret_cast<uint16_t*>(stage)[place];
          value = static_cast<uint16_t>((value & 0x807f) | exponent << 7);
        } else {
          is_refused = true;
        }
      }
    }
    stages.store(work.values, is_valid ? work.bytes : 0);
    if (is_refused) work.set_state(a, SlotState::kRefused);
    work = next;
  }
  stages.finish();
}

}  // namespace
#else
namespace {

template <int kWarps>
__device__ void encode_tiles(const CodecArguments&) {
  __trap();
}
template <int kWarps>
__device__ void decode_tiles(const CodecArguments&) {
  __trap();
}

}  // namespace
#endif

// Dynamic shared memory: codec_shared_bytes() of the warps of a CTA and of a team.
extern "C" __global__ void __launch_bounds__(32 * kCodecMaxWarps)
    kvswap_encode(const __grid_constant__ CodecArguments a) {
  switch (a.team_warps) {
    case 1:
      return encode_tiles<1>(a);
    case 2:
      return encode_tiles<2>(a);
    case 4:
      return encode_tiles<4>(a);
    case 8:
      return encode_tiles<8>(a);
  }
}
extern "C" __global__ void __launch_bounds__(32 * kCodecMaxWarps)
    kvswap_decode(const __grid_constant__ CodecArguments a) {
  switch (a.team_warps) {
    case 1:
      return decode_tiles<1>(a);
    case 2:
      return decode_tiles<2>(a);
    case 4:
      return decode_tiles<4>(a);
    case 8:
      return decode_tiles<8>(a);
  }
}

}  // namespace kvswap
