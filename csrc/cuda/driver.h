#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "check.h"

// The CUDA driver, looked up at run time with prototypes of our own. No CUDA header is needed to
// build this file and no CUDA library to load it, so one binary runs with any driver and without
// one. tests/support/cuda_headers_check.cpp compares every declaration with the headers of several
// CUDA releases. This is the only place that knows driver versions.
namespace kvswap::cuda {

using Result = int;
using Stream = void*;
using Event = void*;
using Context = void*;
using Module = void*;
using Function = void*;
using Address = unsigned long long;

constexpr Result kSuccess = 0;
constexpr Result kNotInitialized = 3;
constexpr Result kNotReady = 600;
constexpr Result kPeerAccessAlreadyEnabled = 704;
constexpr Result kNotSupported = 801;

// The other handle of the legacy default stream; the first is null.
inline const Stream kLegacyStream = reinterpret_cast<Stream>(1);

constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventDefault = 0;
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kRegisterPortable = 1;  // pinned for every device of the process
constexpr unsigned kRegisterMapped = 2;    // kernels may read and write it
constexpr int kCaptureRelaxed = 2;
constexpr int kHas64BitMemoryOperations = 122;
constexpr int kComputeCapabilityMajor = 75;
constexpr int kHasRegisteredAtSameAddress = 91;
constexpr int kPciBus = 33, kPciDevice = 34, kPciDomain = 50;
constexpr int kMaxDynamicSharedBytes = 8;  // of a function
constexpr unsigned kWaitUntilAtLeast = 0;
constexpr unsigned kOpenWithAccess = 1;

// cuGetProcAddress_v2. With the flag, stream 0 means the legacy default stream in what it finds.
using GetProcAddress = Result (*)(const char* symbol, void** function, int version, uint64_t flags,
                                  int* status);
constexpr uint64_t kLegacyStreamFlag = 1;

constexpr int kMemoryType = 2;
constexpr int kDevicePointer = 3;
constexpr int kDeviceOrdinal = 9;
constexpr int kRangeStart = 11;
constexpr int kRangeSize = 12;
constexpr int kMappingSize = 18;
constexpr int kMappingBase = 19;

constexpr unsigned kHostMemory = 1;
constexpr unsigned kDeviceMemory = 2;

constexpr int kSourceOrderStream = 1;
constexpr int kSourceOrderAny = 3;

struct MemoryLocation {
  int type = 0;
  int id = 0;
};

struct CopyAttributes {
  int source_order = kSourceOrderStream;
  MemoryLocation source_hint;
  MemoryLocation destination_hint;
  unsigned flags = 0;
};

// CUDA_MEMCPY3D: rows of `width` bytes, `pitch` apart, in slices of `height` rows.
struct StridedSide {
  size_t x = 0, y = 0, z = 0, level_of_detail = 0;
  unsigned memory_type = 0;
  void* host = nullptr;
  Address device = 0;
  void* array = nullptr;
  void* reserved = nullptr;
  size_t pitch = 0, height = 0;
};

struct StridedCopy {
  StridedSide src, dst;
  size_t width = 0, height = 0, depth = 0;
};

// CUipcMemHandle.
struct MemoryHandle {
  unsigned char bytes[64];
};

struct Driver {
  Result (*get_error_name)(Result, const char**);
  Result (*get_error_string)(Result, const char**);
  Result (*get_version)(int*);
  Result (*retain_primary_context)(Context*, int device);
  Result (*push_context)(Context);
  Result (*pop_context)(Context*);
  Result (*can_access_peer)(int*, int device, int peer);
  Result (*enable_peer_access)(Context, unsigned flags);
  Result (*get_pointer_attributes)(unsigned count, int* attributes, void** values, Address);
  Result (*copy_async)(Address dst, Address src, size_t bytes, Stream);
  Result (*copy_peer_async)(Address dst, Context dst_context, Address src, Context src_context,
                            size_t bytes, Stream);
  Result (*copy_strided_async)(const StridedCopy*, Stream);
  Result (*create_stream)(Stream*, unsigned flags, int priority);
  Result (*destroy_stream)(Stream);
  Result (*synchronize_stream)(Stream);
  Result (*query_stream)(Stream);
  Result (*is_capturing)(Stream, int* status);
  Result (*exchange_capture_mode)(int* mode);
  Result (*create_event)(Event*, unsigned flags);
  Result (*destroy_event)(Event);
  Result (*record_event)(Event, Stream);
  Result (*query_event)(Event);
  Result (*elapsed_time)(float* milliseconds, Event start, Event end);
  Result (*wait_event)(Stream, Event, unsigned flags);
  Result (*allocate)(Address*, size_t bytes);
  Result (*free)(Address);
  Result (*share_memory)(MemoryHandle*, Address);
  Result (*open_memory)(Address*, MemoryHandle, unsigned flags);
  Result (*close_memory)(Address);
  Result (*load_module)(Module*, const void* image);
  Result (*get_function)(Function*, Module, const char* name);
  Result (*set_function_attribute)(Function, int attribute, int value);
  Result (*launch)(Function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, Stream,
                   void** arguments, void** extra);
  Result (*allocate_host)(void**, size_t bytes, unsigned flags);
  Result (*free_host)(void*);
  Result (*register_host)(void*, size_t bytes, unsigned flags);
  Result (*unregister_host)(void*);
  Result (*get_device_attribute)(int*, int attribute, int device);
  // Null where the driver is older than CUDA 11.7.
  Result (*wait_value)(Stream, Address, uint64_t value, unsigned flags);
  Result (*write_value)(Stream, Address, uint64_t value, unsigned flags);
  // Null where the driver is older than CUDA 12.8. Its first signature, with the index of the
  // failed copy, is asked for by version: CUDA 13 dropped that argument under the same name.
  Result (*copy_batch_async)(Address* dsts, Address* srcs, size_t* sizes, size_t count,
                             CopyAttributes*, size_t* attribute_starts, size_t attribute_count,
                             size_t* failed_index, Stream);
};

// The driver, or null on a machine without one. Looks it up on the first call; never initialises
// CUDA.
const Driver* find_driver();

// The same for calls that cannot do without: throws why there is none.
const Driver& driver();

// Why find_driver() is null, or "".
const std::string& driver_error();

// Whether this process has initialised CUDA. Throws in a child that was forked from a process that
// had: the driver answers there as if CUDA had never been used, and device addresses would pass for
// host memory.
bool is_initialised();

// "CUDA_ERROR_INVALID_VALUE (1): invalid argument".
std::string describe(Result result);

// call: the name of the driver's function.
template <typename... Args>
[[noreturn]] void fail_call(Result result, const char* call, const Args&... more) {
  fail(call, more..., ": ", describe(result));
}

}  // namespace kvswap::cuda

// After the call come the name of the driver's function and more text.
#define KVSWAP_DRIVER_CHECK(call, ...)                       \
  do {                                                       \
    const ::kvswap::cuda::Result kvswap_result = (call);     \
    if (kvswap_result != ::kvswap::cuda::kSuccess) {         \
      ::kvswap::cuda::fail_call(kvswap_result, __VA_ARGS__); \
    }                                                        \
  } while (false)
