#include "cuda/driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>

namespace kvswap::cuda {
namespace {

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
    require(table.can_access_peer, "cuDeviceCanAccessPeer", 4000);
    require(table.enable_peer_access, "cuCtxEnablePeerAccess", 4000);
    require(table.get_pointer_attributes, "cuPointerGetAttributes", 7000);
    require(table.copy_async, "cuMemcpyAsync", 4000);
    require(table.copy_peer_async, "cuMemcpyPeerAsync", 4000);
    require(table.copy_strided_async, "cuMemcpy3DAsync", 3020);
    require(table.create_stream, "cuStreamCreateWithPriority", 5050);
    require(table.destroy_stream, "cuStreamDestroy", 4000);
    require(table.synchronize_stream, "cuStreamSynchronize", 2000);
    require(table.query_stream, "cuStreamQuery", 2000);
    require(table.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", 10010);
    require(table.is_capturing, "cuStreamIsCapturing", 10000);
    require(table.create_event, "cuEventCreate", 2000);
    require(table.destroy_event, "cuEventDestroy", 4000);
    require(table.record_event, "cuEventRecord", 2000);
    require(table.wait_event, "cuStreamWaitEvent", 3020);
    require(table.query_event, "cuEventQuery", 2000);
    require(table.elapsed_time, "cuEventElapsedTime", 2000);
    require(table.allocate, "cuMemAlloc", 3020);
    require(table.free, "cuMemFree", 3020);
    require(table.share_memory, "cuIpcGetMemHandle", 4010);
    require(table.open_memory, "cuIpcOpenMemHandle", 11000);
    require(table.close_memory, "cuIpcCloseMemHandle", 4010);
    require(table.load_module, "cuModuleLoadData", 2000);
    require(table.get_function, "cuModuleGetFunction", 2000);
    require(table.set_function_attribute, "cuFuncSetAttribute", 9000);
    require(table.launch, "cuLaunchKernel", 4000);
    require(table.allocate_host, "cuMemHostAlloc", 2020);
    require(table.free_host, "cuMemFreeHost", 2000);
    require(table.register_host, "cuMemHostRegister", 6050);
    require(table.unregister_host, "cuMemHostUnregister", 4000);
    require(table.get_device_attribute, "cuDeviceGetAttribute", 2000);
    find(table.wait_value, "cuStreamWaitValue64", 11070);
    find(table.write_value, "cuStreamWriteValue64", 11070);
    find(table.copy_batch_async, "cuMemcpyBatchAsync", 12080);
  }
};

const Lookup& lookup() {
  static const Lookup instance;
  return instance;
}

bool asks_the_driver() {
  if (find_driver() == nullptr) return false;
  int name = kMemoryType;
  unsigned type = 0;
  void* value = &type;
  return driver().get_pointer_attributes(1, &name, &value, 1) != kNotInitialized;
}

std::atomic<pid_t> process_that_used_cuda{0};

// Called in the parent, right before a fork: the child could not find out later.
void note_use_of_cuda() {
  if (dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD) == nullptr) return;
  if (asks_the_driver()) process_that_used_cuda.store(getpid());
}

__attribute__((constructor)) void watch_forks() {
  pthread_atfork(note_use_of_cuda, nullptr, nullptr);
}

}  // namespace

const Driver* find_driver() { return lookup().error.empty() ? &lookup().table : nullptr; }

const Driver& driver() {
  const Driver* found = find_driver();
  KVSWAP_CHECK(found != nullptr, driver_error());
  return *found;
}

const std::string& driver_error() { return lookup().error; }

bool is_initialised() {
  const pid_t parent = process_that_used_cuda.load();
  const bool initialised = asks_the_driver();
  KVSWAP_CHECK(initialised || parent == 0 || parent == getpid(), "process ", getpid(),
               " was forked from process ", parent,
               ", which used CUDA, and cannot use CUDA itself; start it with the spawn method");
  return initialised;
}

std::string describe(Result result) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (const Driver* table = find_driver()) {
    if (table->get_error_name(result, &name) != kSuccess) name = nullptr;
    if (table->get_error_string(result, &text) != kSuccess) text = nullptr;
  }
  return std::string(name ? name : "CUDA error") + " (" + std::to_string(result) +
         "): " + (text ? text : "unknown to this driver");
}

}  // namespace kvswap::cuda
