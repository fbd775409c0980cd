#include "encoding/launch.h"

#include <algorithm>

#include "check.h"

namespace kvswap {
namespace {

constexpr uint64_t kAddressAlignment = 16;

// ctas: at most, if each has kWarps.
constexpr unsigned kWarps = 4, kOnDevice = 128, kOverLink = 32;

// Warps for a tile of the group.
uint32_t team_warps(const SlotFormat& format, SlotFormat::TileRange range) {
  uint32_t largest = 0;
  for (uint32_t tile = range.begin; tile < range.end; ++tile) {
    largest = std::max(largest, format.tiles()[tile].bytes);
  }
  uint32_t warps = 1;
  while (warps * kCodecWarpBytes < largest) warps *= 2;
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
  arguments.team_warps = team_warps(*copy.format, range);
  return arguments;
}

void launch(CodecArguments& arguments, const CodecCopy& copy, unsigned max_ctas,
            const cuda::Kernels& kernels, cuda::Stream stream) {
  const unsigned tiles = arguments.block_count * arguments.tile_count;
  if (tiles == 0) return;
  const unsigned warps = std::max(kWarps, arguments.team_warps);
  const unsigned teams = warps / arguments.team_warps;
  const unsigned ctas = std::min(max_ctas * kWarps / warps, (tiles + teams - 1) / teams);
  void* pointers[] = {&arguments};
  const cuda::Result result = cuda::driver().launch(
      copy.to_host ? kernels.encode : kernels.decode, ctas, 1, 1, 32 * warps, 1, 1,
      codec_shared_bytes(warps, arguments.team_warps), stream, pointers, nullptr);
  KVSWAP_DRIVER_CHECK(result, "cuLaunchKernel", " of ", copy.to_host ? "encode" : "decode", ", ",
                      arguments.block_count, " blocks of ", arguments.tile_count, " tiles");
}

}  // namespace

TileTable::TileTable(const SlotFormat& format, const Slabs& gpu, cuda::Stream stream) {
  for (size_t slab = 0; slab < gpu.count(); ++slab) {
    if ((gpu.bases[slab] | gpu.strides[slab]) % kAddressAlignment == 0) continue;
    fail<ValueError>("slab ", slab, " begins at address ", gpu.bases[slab], " and its blocks are ",
                     gpu.strides[slab],
                     " bytes apart; with lossless encoding both must be multiples of ",
                     kAddressAlignment);
  }
  const std::vector<SlotTile> tiles = tiles_in(gpu, format.tiles());
  const cuda::Driver& driver = cuda::driver();
  const size_t bytes = tiles.size() * sizeof(SlotTile);
  KVSWAP_DRIVER_CHECK(driver.allocate(&address_, bytes), "cuMemAlloc", " of ", bytes, " bytes");
  const auto from = reinterpret_cast<cuda::Address>(tiles.data());
  cuda::Result result = driver.copy_async(address_, from, bytes, stream);
  if (result == cuda::kSuccess) result = driver.synchronize_stream(stream);
  if (result == cuda::kSuccess) return;
  driver.free(address_);
  KVSWAP_DRIVER_CHECK(result, "cuMemcpyAsync", " of the table of tiles");
}

TileTable::~TileTable() {
  if (address_ != 0) cuda::driver().free(address_);
}

void code_packed(const CodecCopy& copy, size_t first, size_t last, uint64_t packed,
                 const cuda::Kernels& kernels, cuda::Stream stream) {
  CodecArguments arguments = arguments_of(copy);
  arguments.packed_stride = copy.packed_bytes();
  arguments.skipped = copy.format->run_offset(copy.slabs) - copy.format->metadata_bytes();
  for (size_t from = first; from < last; from += kCodecBlocks) {
    const size_t count = std::min<size_t>(last - from, kCodecBlocks);
    arguments.block_count = static_cast<uint32_t>(count);
    for (size_t i = 0; i < count; ++i) {
      arguments.blocks[i] = static_cast<int32_t>(copy.blocks[from + i]);
      arguments.slots[i] = static_cast<int32_t>(i);
    }
    arguments.packed = packed + (from - first) * arguments.packed_stride;
    arguments.states = copy.states + from * sizeof(SlotState);
    launch(arguments, copy, kOnDevice, kernels, stream);
  }
}

void code_on_host(const CodecCopy& copy, const int64_t* slots, uint64_t host, uint64_t stride,
                  const cuda::Kernels& kernels, cuda::Stream stream) {
  CodecArguments arguments = arguments_of(copy);
  arguments.packed_stride = stride;
  arguments.packed = host;
  for (size_t from = 0; from < copy.count; from += kCodecBlocks) {
    const size_t count = std::min<size_t>(copy.count - from, kCodecBlocks);
    arguments.block_count = static_cast<uint32_t>(count);
    for (size_t i = 0; i < count; ++i) {
      arguments.blocks[i] = static_cast<int32_t>(copy.blocks[from + i]);
      arguments.slots[i] = static_cast<int32_t>(slots[from + i]);
    }
    arguments.states = copy.states + from * sizeof(SlotState);
    launch(arguments, copy, kOverLink, kernels, stream);
  }
}

}  // namespace kvswap
