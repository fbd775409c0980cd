#include "encoding/launch.h"

#include <algorithm>

#include "check.h"
#include "copy/address_map.h"
#include "cuda/context.h"

namespace kvswap {
namespace {

constexpr uint64_t kAddressAlignment = 16;

constexpr unsigned kMinWarps = 4;  // of a CTA
// The most warps of a launch: of one between GPU memory and GPU memory, or pinned host memory.
constexpr unsigned kOnDevice = 128 * kMinWarps, kOverLink = 32 * kMinWarps;

// Warps for the largest tile of a block.
uint32_t team_warps(const SlotFormat& format) {
  uint32_t warps = 1;
  while (warps * kCodecWarpBytes < format.largest_tile()) warps *= 2;
  return warps;
}

// What is the same in every launch.
CodecArguments arguments_of(const CodecCopy& copy) {
  const SlotFormat::TileRange range = copy.format->tiles_of(copy.slabs);
  CodecArguments arguments{};
  arguments.tiles = copy.table->address();
  arguments.counters = copy.counters;
  arguments.all_tiles = copy.format->tile_count();
  arguments.max_escapes = copy.format->max_escapes();
  arguments.first_tile = range.begin;
  arguments.tile_count = range.end - range.begin;
  arguments.team_warps = team_warps(*copy.format);
  return arguments;
}

void launch(CodecArguments& arguments, const CodecCopy& copy, unsigned max_warps,
            const cuda::Kernels& kernels, cuda::Stream stream) {
  const unsigned tiles = arguments.block_count * arguments.tile_count;
  if (tiles == 0) return;
  const unsigned warps = std::max(kMinWarps, arguments.team_warps);
  const unsigned teams = warps / arguments.team_warps;
  const unsigned ctas = std::min(max_warps / warps, (tiles + teams - 1) / teams);
  void* pointers[] = {&arguments};
  const cuda::Result result = cuda::driver().launch(
      copy.to_host ? kernels.encode : kernels.decode, ctas, 1, 1, 32 * warps, 1, 1,
      codec_shared_bytes(warps, arguments.team_warps), stream, pointers, nullptr);
  KVSWAP_DRIVER_CHECK(result, "cuLaunchKernel", " of ", copy.to_host ? "encode" : "decode", ", ",
                      arguments.block_count, " blocks of ", arguments.tile_count, " tiles");
}

// Blocks [first, last) of the copy. slot_of: the slot of block i, counted from arguments.packed on.
template <typename SlotOf>
void launch_all(CodecArguments& arguments, const CodecCopy& copy, size_t first, size_t last,
                const SlotOf& slot_of, unsigned max_warps, const cuda::Kernels& kernels,
                cuda::Stream stream) {
  for (size_t from = first; from < last; from += kCodecBlocks) {
    const size_t count = std::min<size_t>(last - from, kCodecBlocks);
    arguments.block_count = static_cast<uint32_t>(count);
    for (size_t i = 0; i < count; ++i) {
      arguments.blocks[i] = static_cast<int32_t>(copy.blocks[from + i]);
      arguments.slots[i] = static_cast<int32_t>(slot_of(from + i));
    }
    arguments.states = copy.states + from * sizeof(SlotState);
    launch(arguments, copy, max_warps, kernels, stream);
  }
}

}  // namespace

TileTable::TileTable(const SlotFormat& format, const Slabs& gpu, cuda::Stream stream) {
  for (size_t slab = 0; slab < gpu.count(); ++slab) {
    if ((gpu.bases[slab] | gpu.strides[slab]) % kAddressAlignment == 0) continue;
    fail<ValueError>("slab ", slab, " begins at address ", hex(gpu.bases[slab]),
                     " and its blocks are ", gpu.strides[slab],
                     " bytes apart; the kernels need multiples of ", kAddressAlignment,
                     " for both: allocate the cache so, or make the pool with encoding='raw'");
  }
  const std::vector<SlotTile> tiles = tiles_in(gpu, format.tiles());
  address_ =
      cuda::upload(tiles.data(), tiles.size() * sizeof(SlotTile), stream, "the table of tiles");
}

TileTable::~TileTable() {
  if (address_ != 0) cuda::driver().free(address_);
}

void code_packed(const CodecCopy& copy, size_t first, size_t last, uint64_t packed,
                 const cuda::Kernels& kernels, cuda::Stream stream) {
  CodecArguments arguments = arguments_of(copy);
  arguments.packed = packed;
  arguments.packed_stride = copy.packed_bytes();
  arguments.skipped = copy.format->run_offset(copy.slabs) - copy.format->metadata_bytes();
  const auto slot_of = [first](size_t i) { return i - first; };
  launch_all(arguments, copy, first, last, slot_of, kOnDevice, kernels, stream);
}

void code_on_host(const CodecCopy& copy, const int64_t* slots, uint64_t host, uint64_t stride,
                  const cuda::Kernels& kernels, cuda::Stream stream) {
  CodecArguments arguments = arguments_of(copy);
  arguments.packed = host;
  arguments.packed_stride = stride;
  const auto slot_of = [slots](size_t i) { return slots[i]; };
  launch_all(arguments, copy, 0, copy.count, slot_of, kOverLink, kernels, stream);
}

}  // namespace kvswap
