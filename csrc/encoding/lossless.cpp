#include <algorithm>
#include <cstring>

#include "check.h"
#include "copy/address_map.h"
#include "cuda/context.h"
#include "encoding/codec.h"
#include "encoding/encoding.h"
#include "encoding/slot_format.h"
#include "kernels/kernels.h"

namespace kvswap {
namespace {

constexpr uint64_t kAddressAlignment = 16;

constexpr unsigned kMinWarps = 4;  // of a CTA
// The most warps of a launch: within GPU memory, and between GPU and pinned host memory.
constexpr unsigned kOnDevice = 128 * kMinWarps, kOverLink = 32 * kMinWarps;
// Raw bytes of the tiles of all teams in a launch over the link. Fewer do not fill the link, more
// slow the compute down: see kBytesOverLink (H100).
constexpr uint32_t kTileBytesOverLink = 240 << 10;

// Warps for the largest tile of a block.
uint32_t team_warps(const SlotFormat& format) {
  uint32_t warps = 1;
  while (warps * kCodecWarpBytes < format.largest_tile()) warps *= 2;
  return warps;
}

// For the stream of the copies and that of the kernels: both may encode at once.
constexpr uint64_t kCounterBytes = kCodecBlocks * sizeof(SlotCounter);

// The tiles of a group's blocks, then counters of escapes for each stream, which are zero.
uint64_t upload_tiles(const SlotFormat& format, const Slabs& gpu, cuda::Stream stream) {
  for (size_t slab = 0; slab < gpu.count(); ++slab) {
    if ((gpu.bases[slab] | gpu.strides[slab]) % kAddressAlignment == 0) continue;
    fail<ValueError>("slab ", slab, " begins at address ", hex(gpu.bases[slab]),
                     " and its blocks are ", gpu.strides[slab],
                     " bytes apart; the kernels need multiples of ", kAddressAlignment,
                     " for both: allocate the cache so, or make the pool with encoding='raw'");
  }
  const std::vector<SlotTile> tiles = tiles_in(gpu, format.tiles());
  std::vector<uint8_t> bytes(tiles.size() * sizeof(SlotTile) + 2 * kCounterBytes);
  std::memcpy(bytes.data(), tiles.data(), tiles.size() * sizeof(SlotTile));
  return cuda::upload(bytes.data(), bytes.size(), stream, "the table of tiles");
}

// The tiles of a group's blocks as an array of SlotTile.
class TileTable : public PackTable {
 public:
  TileTable(const Packing& packing, const SlotFormat& format, const Slabs& gpu,
            const cuda::Kernels& kernels, cuda::Stream stream)
      : PackTable(packing, upload_tiles(format, gpu, stream)), format_(format), kernels_(kernels) {}

  void pack(const PagedCopy& copy, uint64_t begin, uint64_t end, uint64_t packed,
            void* stream) const override {
    CodecArguments arguments = arguments_of(copy, /*counters=*/1);
    const uint64_t size = format_.packed_bytes(copy.slabs);
    arguments.packed = packed;
    arguments.packed_stride = size;
    arguments.skipped = format_.run_offset(copy.slabs) - format_.metadata_bytes();
    launch_all(arguments, copy, begin / size, end / size, kOnDevice, stream);
  }

  void copy_over_link(const PagedCopy& copy, void* stream) const override {
    CodecArguments arguments = arguments_of(copy, /*counters=*/0);
    arguments.packed = copy.host->bases[0];
    arguments.packed_stride = copy.host->strides[0];
    arguments.by_slot = 1;
    const uint32_t tile = format_.largest_tile();
    const unsigned teams = (kTileBytesOverLink + tile - 1) / tile;
    const unsigned warps = std::min(kOverLink, teams * arguments.team_warps);
    launch_all(arguments, copy, 0, copy.count, warps, stream);
  }

 private:
  // What is the same in every launch. counters: which ones, 0 or 1.
  CodecArguments arguments_of(const PagedCopy& copy, int counters) const {
    const SlotFormat::TileRange range = format_.tiles_of(copy.slabs);
    CodecArguments arguments{};
    arguments.tiles = address();
    if (copy.to_host) {
      arguments.counters =
          address() + format_.tile_count() * sizeof(SlotTile) + counters * kCounterBytes;
    }
    arguments.all_tiles = format_.tile_count();
    arguments.max_escapes = format_.max_escapes();
    arguments.first_tile = range.begin;
    arguments.tile_count = range.end - range.begin;
    arguments.team_warps = team_warps(format_);
    return arguments;
  }

  // Blocks [first, last) of the copy. arguments.packed: of the first one, or of slot 0.
  void launch_all(CodecArguments& arguments, const PagedCopy& copy, size_t first, size_t last,
                  unsigned max_warps, cuda::Stream stream) const {
    for (; first < last; first += arguments.block_count) {
      set_blocks(arguments, copy, first, last);
      arguments.states = copy.states_from(first);
      launch(arguments, copy.to_host, max_warps, stream);
      if (arguments.by_slot == 0) {
        arguments.packed += arguments.block_count * arguments.packed_stride;
      }
    }
  }

  void launch(CodecArguments& arguments, bool encodes, unsigned max_warps,
              cuda::Stream stream) const {
    const unsigned tiles = arguments.block_count * arguments.tile_count;
    if (tiles == 0) return;
    const unsigned warps = std::max(kMinWarps, arguments.team_warps);
    const unsigned teams = warps / arguments.team_warps;
    const unsigned ctas = std::min(max_warps / warps, (tiles + teams - 1) / teams);
    cuda::launch(encodes ? kernels_.encode : kernels_.decode, ctas, 32 * warps,
                 codec_shared_bytes(warps, arguments.team_warps), stream, arguments, " of ",
                 encodes ? "encode" : "decode", ", ", arguments.block_count, " blocks of ",
                 arguments.tile_count, " tiles");
  }

  const SlotFormat& format_;
  const cuda::Kernels& kernels_;
};

class LosslessEncoding : public Encoding {
 public:
  explicit LosslessEncoding(const std::vector<uint64_t>& sizes) : format_(sizes) {}

  uint64_t slot_bytes() const override { return format_.slot_bytes(); }
  uint64_t packed_bytes(SlabRange slabs) const override { return format_.packed_bytes(slabs); }
  bool is_divisible() const override { return false; }
  bool can_use(CopyMethod method) const override {
    return method == CopyMethod::kHost || method == CopyMethod::kStaged ||
           method == CopyMethod::kKernel;
  }
  const Demand* demand() const override { return &demand_; }
  bool can_reject() const override { return true; }
  const Rejection& rejection(SlotState, bool is_store) const override {
    return is_store ? store_ : load_;
  }

  FragmentList page_fragments(const PagedCopy& copy, uint64_t begin, uint64_t end,
                              uint64_t packed) const override {
    const uint64_t size = packed_bytes(copy.slabs), metadata = format_.metadata_bytes();
    const uint64_t run = format_.run_offset(copy.slabs);  // of tiles
    const uint64_t first = begin / size, last = end / size;
    FragmentList fragments((run == metadata ? 1 : 2) * (last - first));
    for (uint64_t i = first; i < last; ++i, packed += size) {
      const uint64_t slot = copy.host_address(i);
      fragments.add(copy.fragment(i, packed, slot, metadata), copy.can_merge(i));
      fragments.add(copy.fragment(i, packed + metadata, slot + run, size - metadata), true);
    }
    return fragments;
  }

  void copy_on_host(const PagedCopy& copy) const override {
    const std::vector<SlotTile> tiles = tiles_in(*copy.gpu, format_.tiles());
    const SlotTiles all{tiles.data(), format_.tile_count(), format_.max_escapes()};
    const SlotFormat::TileRange range = format_.tiles_of(copy.slabs);
    for (size_t i = 0; i < copy.count; ++i) {
      auto* slot = reinterpret_cast<uint8_t*>(copy.host_address(i));
      const SlotState state = copy.to_host ? encode_slot(all, copy.blocks[i], slot)
                                           : decode_slot(all, range, slot, copy.blocks[i]);
      if (state != SlotState::kGood) copy.states[i] = static_cast<uint8_t>(state);
    }
  }

  std::shared_ptr<PackTable> make_table(const Slabs& gpu, const Slabs&, int64_t num_blocks,
                                        int64_t num_slots, int device,
                                        void* stream) const override {
    const cuda::Kernels& kernels = cuda::kernels(device);
    KVSWAP_CHECK(kernels.encode != nullptr, "CUDA device ", device,
                 " is older than Ampere, for which there are no kernels that encode; make the pool "
                 "with encoding='raw'");
    KVSWAP_CHECK(has_kernel_ids(num_blocks, num_slots),
                 "the kernels know blocks and slots up to number 2^31 - 1");
    return std::make_shared<TileTable>(*this, format_, gpu, kernels, stream);
  }

 private:
  const SlotFormat format_;
  const Demand demand_{"encoding='lossless'", "encode or decode blocks", "encoding='raw'"};
  const Rejection store_{"does not fit into its slot", "do not fit into their slots", "", "",
                         "some blocks do not fit into their slots"};
  const Rejection load_{"is not in its host page", "are not in their host pages",
                        ": its store was rejected, or nothing was stored there",
                        ": their stores were rejected, or nothing was stored there",
                        "some blocks are not in their host pages"};
};

}  // namespace

std::shared_ptr<const Encoding> make_lossless_encoding(const std::vector<uint64_t>& sizes) {
  return std::make_shared<LosslessEncoding>(sizes);
}

}  // namespace kvswap
