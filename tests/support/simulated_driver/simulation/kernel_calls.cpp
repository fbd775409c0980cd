#include <algorithm>
#include <cstring>

#include "calls.h"
#include "encoding/checksum.h"
#include "encoding/codec.h"
#include "kernels/pack_arguments.h"

// The kernels of the library, which the simulated driver knows by their names, and what they copy.
namespace simulated {
namespace {

constexpr char kPackBulk[] = "kvswap_pack_bulk", kPackWords[] = "kvswap_pack_words",
               kEncode[] = "kvswap_encode", kDecode[] = "kvswap_decode",
               kChecksum[] = "kvswap_checksum", kExpandBlockIds[] = "kvswap_expand_block_ids";
const char* const kNames[] = {kPackBulk, kPackWords, kEncode, kDecode, kChecksum, kExpandBlockIds};

int load_module(void** module, const void* image) {
  const Call call("cuModuleLoadData");
  if (call.result) return call.result;
  *module = const_cast<void*>(image);
  return kSuccess;
}

int get_function(void** function, void*, const char* name) {
  const Call call("cuModuleGetFunction");
  if (call.result) return call.result;
  for (const char* known : kNames) {
    if (std::strcmp(known, name) != 0) continue;
    *function = const_cast<char*>(known);
    return kSuccess;
  }
  return kNotFound;
}

int set_attribute(void*, int, int) { return Call("cuFuncSetAttribute").result; }

// What one launch copies, chunk after chunk.
std::vector<Copy> copies_of(const kvswap::PackArguments& arguments, bool bulk) {
  std::vector<Copy> copies;
  const uint32_t chunks = arguments.block_count * arguments.slab_count * arguments.chunks_per_slab;
  for (uint32_t number = 0; number < chunks; ++number) {
    const kvswap::PackChunk chunk = kvswap::pack_chunk(arguments, number);
    if (chunk.bytes == 0) continue;
    const uint64_t dst = arguments.to_packed ? chunk.packed : chunk.paged;
    const uint64_t src = arguments.to_packed ? chunk.paged : chunk.packed;
    const uint64_t word = bulk ? 16 : arguments.word_bytes;
    if ((dst | src | chunk.bytes) % word != 0) {
      device().log.violation("a kernel moves ", chunk.bytes, " bytes that are not aligned to ",
                             word);
    }
    copies.push_back({dst, src, chunk.bytes, {}});
  }
  return copies;
}

// The codec of the CPU does what the kernels do to one slot.
void encode_slot(const kvswap::CodecArguments& a, uint32_t i, const kvswap::SlotTiles& tiles,
                 uint64_t slot) {
  auto& counter = reinterpret_cast<kvswap::SlotCounter*>(a.counters)[i];
  if (counter != 0) device().log.violation("a kernel encodes with a counter that is not 0");
  const auto state = kvswap::encode_slot(tiles, a.blocks[i], reinterpret_cast<uint8_t*>(slot));
  if (state != kvswap::SlotState::kGood) {
    reinterpret_cast<kvswap::SlotState*>(a.states)[i] = state;
  }
}

void decode_slot(const kvswap::CodecArguments& a, uint32_t i, const kvswap::SlotTiles& tiles,
                 uint64_t slot) {
  // Where they are in a slot that lacks what is skipped.
  std::vector<kvswap::SlotTile> moved(tiles.tiles, tiles.tiles + tiles.count);
  for (kvswap::SlotTile& tile : moved) tile.offset -= static_cast<uint32_t>(a.skipped);
  const auto state = kvswap::decode_slot({moved.data(), tiles.count, tiles.max_escapes},
                                         {a.first_tile, a.first_tile + a.tile_count},
                                         reinterpret_cast<const uint8_t*>(slot), a.blocks[i]);
  if (state != kvswap::SlotState::kGood) {
    reinterpret_cast<kvswap::SlotState*>(a.states)[i] = state;
  }
}

// What one launch encodes or decodes, slot after slot.
std::vector<Coding> codings_of(const kvswap::CodecArguments& arguments, bool encodes) {
  const auto shared = std::make_shared<const kvswap::CodecArguments>(arguments);
  const kvswap::CodecArguments& a = *shared;
  const auto* of_block = reinterpret_cast<const kvswap::SlotTile*>(a.tiles);
  const kvswap::SlotTiles tiles{of_block, a.all_tiles, a.max_escapes};
  std::vector<Coding> codings;
  for (uint32_t i = 0; i < a.block_count; ++i) {
    const uint64_t place = a.by_slot != 0 ? static_cast<uint64_t>(a.slots[i]) : i;
    const uint64_t slot = a.packed + place * a.packed_stride;
    uint64_t slot_end = slot, addresses = slot;
    Coding coding;
    for (uint32_t number = a.first_tile; number < a.first_tile + a.tile_count; ++number) {
      const kvswap::SlotTile& tile = of_block[number];
      const uint64_t values = tile.base + static_cast<uint64_t>(a.blocks[i]) * tile.stride;
      const uint64_t encoded = slot + tile.offset - a.skipped;
      addresses |= values | encoded;
      slot_end = encoded + kvswap::encoded_bytes(tile.bytes);
      coding.memory.emplace_back(values, values + tile.bytes);
      if (tile.bytes > a.team_warps * kvswap::kCodecWarpBytes) {
        device().log.violation("a team of ", a.team_warps, " warps has a tile of ", tile.bytes,
                               " bytes");
      }
    }
    if (addresses % 16 != 0) device().log.violation("a kernel codes what is not aligned to 16");
    coding.memory.emplace_back(slot, slot_end);
    coding.memory.emplace_back(a.states + i, a.states + i + 1);
    if (encodes) {
      const uint64_t counter = a.counters + i * sizeof(kvswap::SlotCounter);
      coding.memory.emplace_back(counter, counter + sizeof(kvswap::SlotCounter));
      coding.run = [shared, i, tiles, slot] { encode_slot(*shared, i, tiles, slot); };
    } else {
      coding.run = [shared, i, tiles, slot] { decode_slot(*shared, i, tiles, slot); };
    }
    codings.push_back(std::move(coding));
  }
  return codings;
}

// What one launch checksums, block after block.
std::vector<Coding> checksums_of(const kvswap::ChecksumArguments& arguments) {
  const auto shared = std::make_shared<const kvswap::ChecksumArguments>(arguments);
  const kvswap::ChecksumArguments& a = *shared;
  std::vector<Coding> codings;
  for (uint32_t i = 0; i < a.block_count; ++i) {
    Coding coding;
    for (uint32_t number = a.first_tile; number < a.first_tile + a.tile_count; ++number) {
      const auto& tile = reinterpret_cast<const kvswap::ChecksumTile*>(a.tiles)[number];
      const uint64_t bytes = tile.base + static_cast<uint64_t>(a.blocks[i]) * tile.stride;
      coding.memory.emplace_back(bytes, bytes + tile.bytes);
      if ((bytes | tile.bytes) % a.word_bytes != 0) {
        device().log.violation("a kernel checksums bytes that are not aligned to ", a.word_bytes);
      }
    }
    coding.memory.emplace_back(a.states + i, a.states + i + 1);
    const uint64_t row = a.rows + static_cast<uint64_t>(a.slots[i]) * a.row_stride;
    const uint64_t checksums = row + sizeof(kvswap::SlotChecksums);
    coding.memory.emplace_back(row, checksums + (a.first_tile + a.tile_count) * sizeof(uint64_t));
    coding.run = [shared, i] { kvswap::checksum_block(*shared, i); };
    codings.push_back(std::move(coding));
  }
  return codings;
}

int launch(void* function, unsigned ctas, unsigned, unsigned, unsigned threads, unsigned, unsigned,
           unsigned shared, void* handle, void** arguments, void**) {
  Call call("cuLaunchKernel");
  if (call.result) return call.result;
  const auto stream = call.stream(handle);
  if (stream == nullptr) return call.result;
  if (stream->device != current_context()) return kInvalidHandle;
  if (ctas == 0 || threads == 0) return kInvalidValue;
  const auto* name = static_cast<const char*>(function);
  if (name == kExpandBlockIds) {
    device().log.add("launch ", name, " on stream ", device().name(handle));
    return kSuccess;
  }
  Operation operation;
  uint32_t blocks = 0;
  const bool encodes = name == kEncode;
  if (encodes || name == kDecode) {
    const auto& codec = *static_cast<const kvswap::CodecArguments*>(arguments[0]);
    blocks = codec.block_count;
    if (blocks != 0) {
      const uint32_t warps = threads / 32, team = codec.team_warps;
      if (team == 0 || warps % team != 0 || warps > kvswap::kCodecMaxWarps) return kInvalidValue;
      if (shared < kvswap::codec_shared_bytes(warps, team)) return kInvalidValue;
      operation.codings = codings_of(codec, encodes);
      const uint64_t end = codec.counters + blocks * sizeof(kvswap::SlotCounter);
      if (encodes && device().in_use(codec.counters, end, stream.get())) {
        device().log.violation("kernels of two streams encode with the same counters");
      }
    }
    operation.name = encodes ? "encode" : "decode";
  } else if (name == kChecksum) {
    const auto& checksum = *static_cast<const kvswap::ChecksumArguments*>(arguments[0]);
    blocks = checksum.block_count;
    if (blocks != 0) operation.codings = checksums_of(checksum);
    operation.name = "checksum";
  } else {
    const auto& pack = *static_cast<const kvswap::PackArguments*>(arguments[0]);
    const bool bulk = name == kPackBulk;
    if (bulk && shared < threads * pack.chunk_bytes) return kInvalidValue;
    blocks = pack.block_count;
    if (blocks != 0) operation.copies = copies_of(pack, bulk);
    operation.name = pack.to_packed ? "pack" : "unpack";
  }
  operation.name += " " + std::to_string(blocks) + " blocks";
  device().log.add(operation.name, " on stream ", device().name(handle));
  device().check_addresses(operation);
  device().submit(*stream, std::move(operation));
  return kSuccess;
}

}  // namespace

Functions kernel_calls() {
  return {
      SIMULATED(cuModuleLoadData, load_module),
      SIMULATED(cuModuleGetFunction, get_function),
      SIMULATED(cuFuncSetAttribute, set_attribute),
      SIMULATED(cuLaunchKernel, launch),
  };
}

}  // namespace simulated
