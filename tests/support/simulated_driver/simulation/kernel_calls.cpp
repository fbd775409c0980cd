#include <cstring>

#include "../../../../csrc/copy/pack_arguments.h"
#include "calls.h"

// The kernels of the library, which the simulated driver knows by their names, and what they copy.
namespace simulated {
namespace {

const char* const kNames[] = {"kvswap_pack_bulk", "kvswap_pack_words", "kvswap_expand_block_ids"};

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

int launch(void* function, unsigned ctas, unsigned, unsigned, unsigned threads, unsigned, unsigned,
           unsigned shared, void* handle, void** arguments, void**) {
  Call call("cuLaunchKernel");
  if (call.result) return call.result;
  const auto stream = call.stream(handle);
  if (stream == nullptr) return call.result;
  if (stream->device != current_context()) return kInvalidHandle;
  if (ctas == 0 || threads == 0) return kInvalidValue;
  const auto* name = static_cast<const char*>(function);
  if (name == kNames[2]) {
    device().log.add("launch ", name, " on stream ", device().name(handle));
    return kSuccess;
  }
  const auto& pack = *static_cast<const kvswap::PackArguments*>(arguments[0]);
  const bool bulk = name == kNames[0];
  if (bulk && shared < threads * pack.chunk_bytes) return kInvalidValue;
  Operation operation;
  if (pack.block_count != 0) operation.copies = copies_of(pack, bulk);
  operation.name = pack.to_packed ? "pack" : "unpack";
  operation.name += " " + std::to_string(pack.block_count) + " blocks";
  device().log.add(operation.name, " on stream ", device().name(handle));
  stream->push(std::move(operation));
  return kSuccess;
}

}  // namespace

Functions kernel_calls() {
  return {
      {"cuModuleLoadData", reinterpret_cast<void*>(&load_module)},
      {"cuModuleGetFunction", reinterpret_cast<void*>(&get_function)},
      {"cuFuncSetAttribute", reinterpret_cast<void*>(&set_attribute)},
      {"cuLaunchKernel", reinterpret_cast<void*>(&launch)},
  };
}

}  // namespace simulated
