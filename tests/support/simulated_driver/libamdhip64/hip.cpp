// Stands in for libamdhip64.so: HIP's functions, numbers and structures, made of the simulated
// driver's functions.
#include <cstring>

#include "../simulation/calls.h"
#include "../simulation/strided_copy.h"

using simulated::Call;
using simulated::device;

namespace {

constexpr int kSuccess = simulated::kSuccess, kInvalidValue = simulated::kInvalidValue;
constexpr int kDefault = 4;  // hipMemcpyDefault
constexpr size_t kMostInBatch = 8192;

// hipPointerAttribute_t.
struct PointerAttributes {
  int type, device;
  void *device_pointer, *host_pointer;
  int is_managed;
  unsigned allocation_flags;
};

struct Attributes {
  int order, hints[4];
  unsigned flags;
};

// Of the thread, as in HIP, which has no contexts.
thread_local int current_device = 0;
thread_local int last_error = kSuccess;

int noted(int result) {
  if (result != kSuccess) last_error = result;
  return result;
}

unsigned long long address(const void* pointer) {
  return reinterpret_cast<unsigned long long>(pointer);
}

extern "C" void* simulated_function(const char* name);

// Calls the function that CUDA has, in the context of the current device.
template <typename... A>
int call(const char* name, A... arguments) {
  const simulated::InContext context(current_device);
  return noted(reinterpret_cast<int (*)(A...)>(simulated_function(name))(arguments...));
}

}  // namespace

extern "C" {

const char* hipGetErrorName(int) { return "hipErrorSimulated"; }
const char* hipGetErrorString(int) { return "made up by the simulated driver"; }

int hipGetLastError() {
  const int error = last_error;
  last_error = kSuccess;
  return error;
}
// The same without forgetting it, for tests: what a kernel launch of PyTorch would find.
int simulated_last_error() { return last_error; }
int simulated_current_device() { return current_device; }

int hipRuntimeGetVersion(int* version) {
  const Call counted("cuDriverGetVersion");
  if (counted.result) return noted(counted.result);
  return *version = 70226015, kSuccess;
}

int hipGetDevice(int* number) {
  const Call counted("hipGetDevice");
  if (counted.result) return noted(counted.result);
  return *number = current_device, kSuccess;
}

int hipSetDevice(int number) {
  const Call counted("hipSetDevice");
  if (counted.result) return noted(counted.result);
  return current_device = number, kSuccess;
}

int hipDeviceGetAttribute(int* value, int attribute, int number) {
  const int of_cuda = attribute == 67 ? 33 : attribute == 68 ? 34 : attribute == 69 ? 50 : -1;
  return call("cuDeviceGetAttribute", value, of_cuda, number);
}

int hipPointerGetAttributes(PointerAttributes* found, const void* pointer) {
  const Call counted("cuPointerGetAttributes");
  if (counted.result) return noted(counted.result);
  if (!device().initialized) return noted(100);  // hipErrorNoDevice
  const simulated::Range range = device().memory.find(address(pointer));
  *found = {};
  found->type = static_cast<int>(range.type);
  found->device = range.type == 0 ? -2 : range.device;
  return kSuccess;
}

int hipPointerGetAttribute(void* value, int attribute, void* pointer) {
  const Call counted("cuPointerGetAttributes");
  if (counted.result) return noted(counted.result);
  const simulated::Range range = device().memory.find(address(pointer));
  if (range.type == 0) return noted(kInvalidValue);
  // AMD writes the range's size (12) as 32 bits.
  if (attribute == 11) std::memcpy(value, &range.begin, sizeof(range.begin));
  if (attribute == 12) *static_cast<uint32_t*>(value) = uint32_t(range.end - range.begin);
  return attribute == 11 || attribute == 12 ? kSuccess : noted(kInvalidValue);
}

int hipMemGetAddressRange(void** base, size_t* bytes, void* pointer) {
  const Call counted("hipMemGetAddressRange");
  if (counted.result) return noted(counted.result);
  const simulated::Range range = device().memory.find(address(pointer));
  if (range.type == 0) return noted(simulated::kNotFound);
  // AMD says no base of registered memory.
  const bool is_registered = range.origin == simulated::Range::kRegistered;
  *base = is_registered ? nullptr : reinterpret_cast<void*>(range.begin);
  *bytes = range.end - range.begin;
  return kSuccess;
}

int hipMemcpyAsync(void* dst, const void* src, size_t bytes, int kind, void* stream) {
  if (kind != kDefault) return noted(kInvalidValue);
  return call("cuMemcpyAsync", address(dst), address(src), bytes, stream);
}

int hipMemcpyPeerAsync(void* dst, int, const void* src, int, size_t bytes, void* stream) {
  void* const no_context = nullptr;
  return call("cuMemcpyPeerAsync", address(dst), no_context, address(src), no_context, bytes,
              stream);
}

int hipMemcpy2DAsync(void* dst, size_t dst_pitch, const void* src, size_t src_pitch, size_t width,
                     size_t height, int kind, void* stream) {
  if (kind != kDefault) return noted(kInvalidValue);
  simulated::StridedCopy copy{};
  copy.src.memory_type = copy.dst.memory_type = 2;
  copy.src.device = address(src);
  copy.dst.device = address(dst);
  copy.src.pitch = src_pitch;
  copy.dst.pitch = dst_pitch;
  copy.src.height = copy.dst.height = copy.height = height;
  copy.width = width;
  copy.depth = 1;
  const simulated::StridedCopy* const arguments = &copy;
  return call("cuMemcpy3DAsync", arguments, stream);
}

#ifndef SIMULATED_BEFORE_ROCM_7_1
int hipMemcpyBatchAsync(void** dsts, void** srcs, size_t* sizes, size_t count, Attributes*, size_t*,
                        size_t attribute_count, size_t* failed, void* stream) {
  if (attribute_count > 0) return noted(simulated::kNotSupported);  // until ROCm 7.12
  if (count > kMostInBatch) {
    const Call counted("hipMemcpyBatchAsync");
    device().log.violation("a batch of ", count, " copies faults in ROCm 7.14");
    return noted(kInvalidValue);
  }
  Attributes in_order{1, {}, 0};
  size_t start = 0, index = 0;
  const int result = call("cuMemcpyBatchAsync", reinterpret_cast<unsigned long long*>(dsts),
                          reinterpret_cast<unsigned long long*>(srcs), sizes, count, &in_order,
                          &start, size_t{1}, &index, stream);
  if (failed != nullptr) *failed = ~size_t{0};  // AMD names no copy
  return result;
}
#endif

int hipStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  return call("cuStreamCreateWithPriority", stream, flags, priority);
}
int hipStreamDestroy(void* stream) { return call("cuStreamDestroy", stream); }
int hipStreamSynchronize(void* stream) { return call("cuStreamSynchronize", stream); }
int hipStreamQuery(void* stream) { return call("cuStreamQuery", stream); }
int hipStreamWaitEvent(void* stream, void* event, unsigned flags) {
  return call("cuStreamWaitEvent", stream, event, flags);
}
int hipStreamIsCapturing(void* stream, int* status) {
  return call("cuStreamIsCapturing", stream, status);
}
int hipThreadExchangeStreamCaptureMode(int* mode) {
  return call("cuThreadExchangeStreamCaptureMode", mode);
}
int hipEventCreateWithFlags(void** event, unsigned flags) {
  return call("cuEventCreate", event, flags);
}
int hipEventDestroy(void* event) { return call("cuEventDestroy", event); }
int hipEventRecord(void* event, void* stream) { return call("cuEventRecord", event, stream); }
int hipEventQuery(void* event) { return call("cuEventQuery", event); }
int hipEventElapsedTime(float* milliseconds, void* start, void* end) {
  return call("cuEventElapsedTime", milliseconds, start, end);
}
int hipHostRegister(void* memory, size_t bytes, unsigned flags) {
  return call("cuMemHostRegister", memory, bytes, flags);
}
int hipHostUnregister(void* memory) { return call("cuMemHostUnregister", memory); }
}
