#include "kernels/kernels.h"

#include <map>
#include <mutex>
#include <utility>

#include "cuda/context.h"
#include "kernels/checksum_arguments.h"
#include "kernels/expand_block_ids.h"
#include "kernels/pack_arguments.h"
#include "kernels/slot.h"

#ifdef KVSWAP_WITH_KERNELS
// That setup.py has made of the files NAME.cu here.
extern "C" const unsigned char kvswap_pack_image[], kvswap_codec_image[], kvswap_checksum_image[],
    kvswap_expand_block_ids_image[];
#endif

namespace kvswap::cuda {
namespace {

#ifdef KVSWAP_WITH_KERNELS

constexpr int kNoMachineCode = 209;
constexpr int kAmpere = 8, kHopper = 9;
// The most that a launch asks for. Every GPU has them that has the kernel.
constexpr int kPackSharedBytes = 64 << 10;
constexpr int kCodecSharedBytes = codec_shared_bytes(kCodecMaxWarps, kCodecMaxWarps);

Module load_module(const void* image) {
  Module module = nullptr;
  const Result result = driver().load_module(&module, image);
  KVSWAP_CHECK(result != kNoMachineCode,
               "this library was built without machine code for this GPU; build it again with the "
               "GPU's architecture in TORCH_CUDA_ARCH_LIST");
  KVSWAP_DRIVER_CHECK(result, "cuModuleLoadData");
  return module;
}

Function find(Module module, const char* name) {
  Function function = nullptr;
  KVSWAP_DRIVER_CHECK(driver().get_function(&function, module, name), "cuModuleGetFunction", " of ",
                      name);
  return function;
}

void allow_shared_bytes(Function function, int bytes) {
  KVSWAP_DRIVER_CHECK(driver().set_function_attribute(function, kMaxDynamicSharedBytes, bytes),
                      "cuFuncSetAttribute");
}

// Launches the kernel with nothing to do, which loads it.
template <typename Arguments>
void warm_up(Function kernel, Arguments nothing, Stream stream) {
  launch(kernel, 1, 32, 0, stream, nothing);
}

Kernels load(int device) {
  int capability = 0;
  KVSWAP_DRIVER_CHECK(driver().get_device_attribute(&capability, kComputeCapabilityMajor, device),
                      "cuDeviceGetAttribute");
  const Module pack = load_module(kvswap_pack_image);
  Kernels kernels;
  kernels.pack_words = find(pack, "kvswap_pack_words");
  if (capability >= kHopper) {
    kernels.pack_bulk = find(pack, "kvswap_pack_bulk");
    allow_shared_bytes(kernels.pack_bulk, kPackSharedBytes);
  }
  if (capability >= kAmpere) {
    const Module codec = load_module(kvswap_codec_image);
    kernels.encode = find(codec, "kvswap_encode");
    kernels.decode = find(codec, "kvswap_decode");
    for (const Function kernel : {kernels.encode, kernels.decode}) {
      allow_shared_bytes(kernel, kCodecSharedBytes);
    }
  }
  kernels.checksum = find(load_module(kvswap_checksum_image), "kvswap_checksum");
  kernels.expand_block_ids =
      find(load_module(kvswap_expand_block_ids_image), "kvswap_expand_block_ids");
  const Stream stream = create_stream();
  if (kernels.pack_bulk != nullptr) warm_up(kernels.pack_bulk, PackArguments{}, stream);
  warm_up(kernels.pack_words, PackArguments{}, stream);
  for (const Function codec : {kernels.encode, kernels.decode}) {
    if (codec != nullptr) warm_up(codec, CodecArguments{}, stream);
  }
  warm_up(kernels.checksum, ChecksumArguments{}, stream);
  warm_up(kernels.expand_block_ids, Expansion{}, stream);
  const Result loaded = driver().synchronize_stream(stream);
  driver().destroy_stream(stream);
  KVSWAP_DRIVER_CHECK(loaded, "loading the kernels");
  return kernels;
}

#else

[[noreturn]] Kernels load(int) {
  fail(
      "this library was built without nvcc and has no CUDA kernels; install the CUDA toolkit and "
      "build again");
}

#endif

}  // namespace

const Kernels& kernels(int device) {
  static std::mutex mutex;
  static std::map<int, Kernels> loaded;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = loaded.find(device);
  return found != loaded.end() ? found->second : loaded.emplace(device, load(device)).first->second;
}

}  // namespace kvswap::cuda
