#pragma once

#include <string>

#include "cuda/driver.h"

// AMD's HIP runtime behind the table of the CUDA driver. PyTorch for ROCm calls its devices "cuda"
// too, so the rest of the library sees one driver. What HIP lacks is null in the table.
//
// Prototypes, numbers and structures are those of hip/hip_runtime_api.h, ROCm 6.0 and newer;
// tests/support/hip_headers_check.cpp compares them. Nobody has run this on AMD's hardware yet.
namespace kvswap::cuda {

constexpr Result kHipInvalidValue = 1, kHipNoDevice = 100;
constexpr int kHipCopyDefault = 4;  // the direction follows from the addresses
constexpr int kHipPciBus = 67, kHipPciDevice = 68, kHipPciDomain = 69;
constexpr int kHipRangeStart = 11;

// hipPointerAttribute_t. The types kHostMemory and kDeviceMemory have CUDA's numbers.
struct PointerAttributes {
  int type = 0;
  int device = 0;
  void* device_pointer = nullptr;
  void* host_pointer = nullptr;
  int is_managed = 0;
  unsigned allocation_flags = 0;
};

// HIP's functions, by their names.
struct HipRuntime {
  const char* (*hipGetErrorName)(Result);
  const char* (*hipGetErrorString)(Result);
  Result (*hipGetLastError)();
  Result (*hipRuntimeGetVersion)(int*);
  Result (*hipGetDevice)(int*);
  Result (*hipSetDevice)(int);
  Result (*hipDeviceGetAttribute)(int*, int attribute, int device);
  Result (*hipPointerGetAttributes)(PointerAttributes*, const void*);
  Result (*hipPointerGetAttribute)(void* value, int attribute, void*);
  Result (*hipMemGetAddressRange)(void** base, size_t* bytes, void*);
  Result (*hipMemcpyAsync)(void* dst, const void* src, size_t bytes, int kind, Stream);
  Result (*hipMemcpyPeerAsync)(void* dst, int dst_device, const void* src, int src_device,
                               size_t bytes, Stream);
  Result (*hipMemcpy2DAsync)(void* dst, size_t dst_pitch, const void* src, size_t src_pitch,
                             size_t width, size_t height, int kind, Stream);
  Result (*hipMemcpyBatchAsync)(void** dsts, void** srcs, size_t* sizes, size_t count,
                                void* attributes, size_t* attribute_starts, size_t attribute_count,
                                size_t* failed_index, Stream);
  Result (*hipStreamCreateWithPriority)(Stream*, unsigned flags, int priority);
  Result (*hipStreamDestroy)(Stream);
  Result (*hipStreamSynchronize)(Stream);
  Result (*hipStreamQuery)(Stream);
  Result (*hipStreamWaitEvent)(Stream, Event, unsigned flags);
  Result (*hipStreamIsCapturing)(Stream, int* status);
  Result (*hipThreadExchangeStreamCaptureMode)(int* mode);
  Result (*hipEventCreateWithFlags)(Event*, unsigned flags);
  Result (*hipEventDestroy)(Event);
  Result (*hipEventRecord)(Event, Stream);
  Result (*hipEventQuery)(Event);
  Result (*hipEventElapsedTime)(float* milliseconds, Event start, Event end);
  Result (*hipHostRegister)(void*, size_t bytes, unsigned flags);
  Result (*hipHostUnregister)(void*);
};

// Whether this process has loaded a PyTorch for ROCm. Loads nothing.
bool has_hip();

// Fills the table from the HIP runtime that PyTorch uses. Returns why that is not possible, or "".
std::string find_hip(Driver& table);

// Whether this library has made HIP start. HIP does not tell whether anyone else has.
bool has_used_hip();

// HIP's name for a function of the CUDA driver; the same text if it has none.
const char* hip_name(const char* cuda_name);

}  // namespace kvswap::cuda
