#include "cuda/hip.h"

#include <dlfcn.h>

#include <atomic>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

namespace kvswap::cuda {
namespace {

// A longer distance between rows is refused.
constexpr size_t kMaxPitch = 0x7ffffffe;
// From ROCm 7.14 on, AMD's batch call faults with more copies.
constexpr size_t kMaxBatch = 8192;

HipRuntime hip{};
std::atomic<bool> used{false};

// HIP keeps the last error of a thread, and PyTorch asks for it after a kernel launch: an error
// that is handled here would be taken for one of that launch.
Result settled(Result result) {
  if (result != kSuccess) hip.hipGetLastError();
  return result;
}

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

Result get_error_name(Result result, const char** name) {
  *name = hip.hipGetErrorName(result);
  return kSuccess;
}

Result get_error_string(Result result, const char** text) {
  *text = hip.hipGetErrorString(result);
  return kSuccess;
}

// HIP says 7 * 10'000'000 + 2 * 100'000 + a patch for 7.2, CUDA's driver would say 7020.
Result get_version(int* version) {
  int number = 0;
  const Result result = settled(hip.hipRuntimeGetVersion(&number));
  *version = number / 10'000'000 * 1000 + number / 100'000 % 100 * 10;
  return result;
}

// HIP has no contexts: a thread has a current device. A context is its device's number, plus one.

Context context_of(int device) { return reinterpret_cast<Context>(uintptr_t(device) + 1); }
int device_of(Context context) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1;
}

thread_local std::vector<int> outer_devices;

Result retain_primary_context(Context* context, int device) {
  *context = context_of(device);
  return kSuccess;
}

Result push_context(Context context) {
  int before = 0;
  if (const Result result = hip.hipGetDevice(&before)) return settled(result);
  outer_devices.push_back(before);
  const Result result = settled(hip.hipSetDevice(device_of(context)));
  if (result != kSuccess) outer_devices.pop_back();
  used.store(true);
  return result;
}

Result pop_context(Context* context) {
  const int before = outer_devices.back();
  outer_devices.pop_back();
  *context = context_of(before);
  return settled(hip.hipSetDevice(before));
}

struct Range {
  uint64_t begin = 0;
  size_t bytes = 0;  // 0: not known
  bool has(uint64_t address) const { return address >= begin && address - begin < bytes; }
};

// The allocation that contains an address. HIP documents this for device memory. AMD answers for
// host memory too, but leaves the base of registered memory out; the pointer attribute has it. The
// size is not asked from there, where AMD writes only 32 bits.
Range range_of(Address address) {
  void* base = nullptr;
  Range range;
  if (settled(hip.hipMemGetAddressRange(&base, &range.bytes, pointer(address))) != kSuccess) {
    return {};
  }
  range.begin = reinterpret_cast<uint64_t>(base);
  if (range.has(address)) return range;
  void* start = nullptr;
  settled(hip.hipPointerGetAttribute(&start, kHipRangeStart, pointer(address)));
  range.begin = reinterpret_cast<uint64_t>(start);
  return range.has(address) ? range : Range{};
}

Result get_pointer_attributes(unsigned count, int* names, void** values, Address address) {
  PointerAttributes found;
  const Result result = settled(hip.hipPointerGetAttributes(&found, pointer(address)));
  if (result == kHipNoDevice) return kNotInitialized;
  used.store(true);
  if (result == kHipInvalidValue) found = {};  // older releases, for memory that HIP does not know
  if (result != kSuccess && result != kHipInvalidValue) return result;
  const bool is_known = found.type == kHostMemory || found.type == kDeviceMemory;
  Range range, mapping;
  if (is_known && count > 1) {
    range = mapping = range_of(address);
    // Where the end is not known, nothing is refused for lying behind it.
    if (range.bytes == 0) mapping = {address, ~size_t{0} - address};
  }
  for (unsigned i = 0; i < count; ++i) {
    switch (names[i]) {
      case kMemoryType:
        *static_cast<unsigned*>(values[i]) = is_known ? static_cast<unsigned>(found.type) : 0;
        break;
      case kDeviceOrdinal:
        *static_cast<int*>(values[i]) = found.device;
        break;
      case kRangeStart:
        *static_cast<Address*>(values[i]) = range.begin;
        break;
      case kRangeSize:
        *static_cast<size_t*>(values[i]) = range.bytes;
        break;
      case kMappingBase:
        *static_cast<Address*>(values[i]) = mapping.begin;
        break;
      case kMappingSize:
        *static_cast<size_t*>(values[i]) = mapping.bytes;
        break;
      default:
        return kHipInvalidValue;
    }
  }
  return kSuccess;
}

Result get_device_attribute(int* value, int attribute, int device) {
  constexpr std::pair<int, int> kNumbers[] = {
      {kPciBus, kHipPciBus}, {kPciDevice, kHipPciDevice}, {kPciDomain, kHipPciDomain}};
  for (const auto& [cuda, number] : kNumbers) {
    if (attribute == cuda) return settled(hip.hipDeviceGetAttribute(value, number, device));
  }
  return kHipInvalidValue;  // the number would mean something else
}

Result copy_async(Address dst, Address src, size_t bytes, Stream stream) {
  return settled(hip.hipMemcpyAsync(pointer(dst), pointer(src), bytes, kHipCopyDefault, stream));
}

Result copy_peer_async(Address dst, Context dst_context, Address src, Context src_context,
                       size_t bytes, Stream stream) {
  return settled(hip.hipMemcpyPeerAsync(pointer(dst), device_of(dst_context), pointer(src),
                                        device_of(src_context), bytes, stream));
}

Address base_of(const StridedSide& side) {
  return side.memory_type == kHostMemory ? reinterpret_cast<Address>(side.host) : side.device;
}

// Rows of one slice each. hipDrvMemcpy3DAsync, which is like CUDA's call, is not recorded in a
// captured graph.
Result copy_strided_async(const StridedCopy* copy, Stream stream) {
  if (copy->height != 1) return kHipInvalidValue;
  const size_t src_distance = copy->src.pitch * copy->src.height;
  const size_t dst_distance = copy->dst.pitch * copy->dst.height;
  const Address src = base_of(copy->src), dst = base_of(copy->dst);
  if (src_distance <= kMaxPitch && dst_distance <= kMaxPitch) {
    return settled(hip.hipMemcpy2DAsync(pointer(dst), dst_distance, pointer(src), src_distance,
                                        copy->width, copy->depth, kHipCopyDefault, stream));
  }
  for (size_t i = 0; i < copy->depth; ++i) {
    const Result result =
        copy_async(dst + i * dst_distance, src + i * src_distance, copy->width, stream);
    if (result != kSuccess) return result;
  }
  return kSuccess;
}

// Without attributes, which ROCm before 7.13 refuses: the sources are read in stream order, which
// is always right.
Result copy_batch_async(Address* dsts, Address* srcs, size_t* sizes, size_t count, CopyAttributes*,
                        size_t*, size_t, size_t* failed_index, Stream stream) {
  size_t no_start = 0;
  *failed_index = ~size_t{0};  // AMD does not set it in every failure
  return settled(hip.hipMemcpyBatchAsync(reinterpret_cast<void**>(dsts),
                                         reinterpret_cast<void**>(srcs), sizes, count, nullptr,
                                         &no_start, 0, failed_index, stream));
}

Result create_stream(Stream* stream, unsigned flags, int priority) {
  return settled(hip.hipStreamCreateWithPriority(stream, flags, priority));
}
Result destroy_stream(Stream stream) { return settled(hip.hipStreamDestroy(stream)); }
Result synchronize_stream(Stream stream) { return settled(hip.hipStreamSynchronize(stream)); }
Result query_stream(Stream stream) { return settled(hip.hipStreamQuery(stream)); }
Result is_capturing(Stream stream, int* status) {
  return settled(hip.hipStreamIsCapturing(stream, status));
}
Result exchange_capture_mode(int* mode) {
  return settled(hip.hipThreadExchangeStreamCaptureMode(mode));
}
Result create_event(Event* event, unsigned flags) {
  return settled(hip.hipEventCreateWithFlags(event, flags));
}
Result destroy_event(Event event) { return settled(hip.hipEventDestroy(event)); }
Result record_event(Event event, Stream stream) {
  return settled(hip.hipEventRecord(event, stream));
}
Result query_event(Event event) { return settled(hip.hipEventQuery(event)); }
Result elapsed_time(float* milliseconds, Event start, Event end) {
  return settled(hip.hipEventElapsedTime(milliseconds, start, end));
}
Result wait_event(Stream stream, Event event, unsigned flags) {
  return settled(hip.hipStreamWaitEvent(stream, event, flags));
}
Result register_host(void* address, size_t bytes, unsigned flags) {
  return settled(hip.hipHostRegister(address, bytes, flags));
}
Result unregister_host(void* address) { return settled(hip.hipHostUnregister(address)); }

// Null for what HIP lacks or what is of no use there: modules and kernels, whose machine code is
// for NVIDIA's GPUs, with the memory that they need; and stream memory operations, which AMD
// documents for single words of signal memory, and which are not recorded in a captured graph.
Driver table() {
  Driver table{};
  table.is_hip = true;
  table.max_batch = kMaxBatch;
  table.get_error_name = &get_error_name;
  table.get_error_string = &get_error_string;
  table.get_version = &get_version;
  table.retain_primary_context = &retain_primary_context;
  table.push_context = &push_context;
  table.pop_context = &pop_context;
  table.get_pointer_attributes = &get_pointer_attributes;
  table.copy_async = &copy_async;
  table.copy_peer_async = &copy_peer_async;
  table.copy_strided_async = &copy_strided_async;
  table.create_stream = &create_stream;
  table.destroy_stream = &destroy_stream;
  table.synchronize_stream = &synchronize_stream;
  table.query_stream = &query_stream;
  table.is_capturing = &is_capturing;
  table.exchange_capture_mode = &exchange_capture_mode;
  table.create_event = &create_event;
  table.destroy_event = &destroy_event;
  table.record_event = &record_event;
  table.query_event = &query_event;
  table.elapsed_time = &elapsed_time;
  table.wait_event = &wait_event;
  table.register_host = &register_host;
  table.unregister_host = &unregister_host;
  table.get_device_attribute = &get_device_attribute;
  if (hip.hipMemcpyBatchAsync != nullptr) table.copy_batch_async = &copy_batch_async;
  return table;
}

constexpr std::pair<const char*, const char*> kNames[] = {
    {"cuCtxPushCurrent", "hipSetDevice"},
    {"cuDeviceGetAttribute", "hipDeviceGetAttribute"},
    {"cuEventCreate", "hipEventCreateWithFlags"},
    {"cuEventElapsedTime", "hipEventElapsedTime"},
    {"cuEventQuery", "hipEventQuery"},
    {"cuEventRecord", "hipEventRecord"},
    {"cuMemcpy3DAsync", "hipMemcpy2DAsync"},
    {"cuMemcpyAsync", "hipMemcpyAsync"},
    {"cuMemcpyBatchAsync", "hipMemcpyBatchAsync"},
    {"cuMemcpyPeerAsync", "hipMemcpyPeerAsync"},
    {"cuMemHostRegister", "hipHostRegister"},
    {"cuMemHostUnregister", "hipHostUnregister"},
    {"cuPointerGetAttributes", "hipPointerGetAttributes"},
    {"cuStreamCreateWithPriority", "hipStreamCreateWithPriority"},
    {"cuStreamIsCapturing", "hipStreamIsCapturing"},
    {"cuStreamQuery", "hipStreamQuery"},
    {"cuStreamSynchronize", "hipStreamSynchronize"},
    {"cuStreamWaitEvent", "hipStreamWaitEvent"},
};

// The library of PyTorch that is linked with the HIP runtime: a look-up in it also searches what it
// is linked with, whatever the file of the runtime is called.
void* torch_library() { return dlopen("libtorch_hip.so", RTLD_LAZY | RTLD_NOLOAD); }

}  // namespace

bool has_hip() {
  void* const library = torch_library();
  if (library != nullptr) dlclose(library);  // PyTorch keeps it
  return library != nullptr;
}

std::string find_hip(Driver& driver) {
  void* const library = torch_library();
  if (library == nullptr) return "PyTorch's libtorch_hip.so is not loaded";
  std::string error;
  const auto find = [&](auto& function, const char* name) {
    void* const address = dlsym(library, name);
    function = reinterpret_cast<std::decay_t<decltype(function)>>(address);
    if (address == nullptr && error.empty()) {
      error = std::string("the HIP runtime of PyTorch has no ") + name +
              "; install a PyTorch for ROCm 6.0 or newer";
    }
  };
#define KVSWAP_FIND(name) find(hip.name, #name)
  KVSWAP_FIND(hipGetErrorName);
  KVSWAP_FIND(hipGetErrorString);
  KVSWAP_FIND(hipGetLastError);
  KVSWAP_FIND(hipRuntimeGetVersion);
  KVSWAP_FIND(hipGetDevice);
  KVSWAP_FIND(hipSetDevice);
  KVSWAP_FIND(hipDeviceGetAttribute);
  KVSWAP_FIND(hipPointerGetAttributes);
  KVSWAP_FIND(hipPointerGetAttribute);
  KVSWAP_FIND(hipMemGetAddressRange);
  KVSWAP_FIND(hipMemcpyAsync);
  KVSWAP_FIND(hipMemcpyPeerAsync);
  KVSWAP_FIND(hipMemcpy2DAsync);
  KVSWAP_FIND(hipStreamCreateWithPriority);
  KVSWAP_FIND(hipStreamDestroy);
  KVSWAP_FIND(hipStreamSynchronize);
  KVSWAP_FIND(hipStreamQuery);
  KVSWAP_FIND(hipStreamWaitEvent);
  KVSWAP_FIND(hipStreamIsCapturing);
  KVSWAP_FIND(hipThreadExchangeStreamCaptureMode);
  KVSWAP_FIND(hipEventCreateWithFlags);
  KVSWAP_FIND(hipEventDestroy);
  KVSWAP_FIND(hipEventRecord);
  KVSWAP_FIND(hipEventQuery);
  KVSWAP_FIND(hipEventElapsedTime);
  KVSWAP_FIND(hipHostRegister);
  KVSWAP_FIND(hipHostUnregister);
#undef KVSWAP_FIND
  if (!error.empty()) return error;
  // By its version: CUDA's call of this name has lost an argument, and HIP's may too.
  hip.hipMemcpyBatchAsync = reinterpret_cast<decltype(hip.hipMemcpyBatchAsync)>(
      dlvsym(library, "hipMemcpyBatchAsync", "hip_7.1"));
  driver = table();
  return "";
}

bool has_used_hip() { return used.load(); }

const char* hip_name(const char* cuda_name) {
  for (const auto& [cuda, name] : kNames) {
    if (std::strcmp(cuda, cuda_name) == 0) return name;
  }
  return cuda_name;
}

}  // namespace kvswap::cuda
