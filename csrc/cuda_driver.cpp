#include "cuda_driver.h"

#include <dlfcn.h>

namespace kvswap::cuda {
namespace {

using GetProcAddress = Result (*)(const char* symbol, void** function, int version, uint64_t flags,
                                  int* status);

// Stream 0 means the legacy default stream, as it does in the library's callers.
constexpr uint64_t kLegacyStreamFlag = 1;

struct Lookup {
  Driver table{};
  std::string error;
  GetProcAddress get_proc_address = nullptr;

  template <typename Function>
  bool find(Function& function, const char* name, int version) {
    void* address = nullptr;
    int status = 0;
    if (get_proc_address(name, &address, version, kLegacyStreamFlag, &status) != kSuccess) {
      address = nullptr;
    }
    function = reinterpret_cast<Function>(address);
    return address != nullptr;
  }

  template <typename Function>
  void require(Function& function, const char* name, int version) {
    if (!find(function, name, version) && error.empty()) {
      error = std::string("the CUDA driver has no ") + name + "; install driver 525 or newer";
    }
  }

  Lookup() {
    void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (library == nullptr) {
      error = "libcuda.so.1 cannot be loaded: no NVIDIA driver on this machine";
      return;
    }
    get_proc_address = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
    if (get_proc_address == nullptr) {
      error = "the CUDA driver has no cuGetProcAddress_v2; install driver 525 or newer";
      return;
    }
    require(table.get_error_name, "cuGetErrorName", 6000);
    require(table.get_error_string, "cuGetErrorString", 6000);
    require(table.get_version, "cuDriverGetVersion", 2020);
    require(table.retain_primary_context, "cuDevicePrimaryCtxRetain", 7000);
    require(table.push_context, "cuCtxPushCurrent", 4000);
    require(table.pop_context, "cuCtxPopCurrent", 4000);
    require(table.get_pointer_attributes, "cuPointerGetAttributes", 7000);
    require(table.copy_async, "cuMemcpyAsync", 4000);
    require(table.copy_peer_async, "cuMemcpyPeerAsync", 4000);
    require(table.create_stream, "cuStreamCreate", 2000);
    require(table.destroy_stream, "cuStreamDestroy", 4000);
    require(table.synchronize_stream, "cuStreamSynchronize", 2000);
    require(table.is_capturing, "cuStreamIsCapturing", 10000);
    require(table.create_event, "cuEventCreate", 2000);
    require(table.destroy_event, "cuEventDestroy", 4000);
    require(table.record_event, "cuEventRecord", 2000);
    require(table.wait_event, "cuStreamWaitEvent", 3020);
    find(table.copy_batch_async, "cuMemcpyBatchAsync", 12080);
  }
};

const Lookup& lookup() {
  static const Lookup instance;
  return instance;
}

}  // namespace

const Driver* driver() { return lookup().error.empty() ? &lookup().table : nullptr; }

const std::string& driver_error() { return lookup().error; }

std::string describe(Result result) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (const Driver* table = driver()) {
    if (table->get_error_name(result, &name) != kSuccess) name = nullptr;
    if (table->get_error_string(result, &text) != kSuccess) text = nullptr;
  }
  return std::string(name ? name : "CUDA error") + " (" + std::to_string(result) +
         "): " + (text ? text : "unknown to this driver");
}

}  // namespace kvswap::cuda
