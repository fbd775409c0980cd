// Compares the prototypes of csrc/cuda/hip.h with the headers of a ROCm release. Only compiled:
// tests/unit/test_binary.py runs the compiler over it.
#include <hip/hip_runtime_api.h>

#include <cstddef>

#include "../../csrc/cuda/hip.h"
#include "same_abi.h"

namespace {

using namespace kvswap;

#define SAME(function) \
  static_assert(SameAbi<decltype(cuda::HipRuntime::function), decltype(&::function)>::value)

SAME(hipGetErrorName);
SAME(hipGetErrorString);
SAME(hipGetLastError);
SAME(hipRuntimeGetVersion);
SAME(hipGetDevice);
SAME(hipSetDevice);
SAME(hipDeviceGetAttribute);
SAME(hipPointerGetAttributes);
SAME(hipPointerGetAttribute);
SAME(hipMemGetAddressRange);
SAME(hipMemcpyAsync);
SAME(hipMemcpyPeerAsync);
SAME(hipMemcpy2DAsync);
#if HIP_VERSION >= 70100000
SAME(hipMemcpyBatchAsync);
#endif
SAME(hipStreamCreateWithPriority);
SAME(hipStreamDestroy);
SAME(hipStreamSynchronize);
SAME(hipStreamQuery);
SAME(hipStreamWaitEvent);
SAME(hipStreamIsCapturing);
SAME(hipThreadExchangeStreamCaptureMode);
SAME(hipEventCreateWithFlags);
SAME(hipEventDestroy);
SAME(hipEventRecord);
SAME(hipEventQuery);
SAME(hipEventElapsedTime);
SAME(hipHostRegister);
SAME(hipHostUnregister);

static_assert(cuda::kHipInvalidValue == hipErrorInvalidValue);
static_assert(cuda::kHipNoDevice == hipErrorNoDevice);
static_assert(cuda::kHipCopyDefault == hipMemcpyDefault);
static_assert(cuda::kHipPciBus == hipDeviceAttributePciBusId);
static_assert(cuda::kHipPciDevice == hipDeviceAttributePciDeviceId);
static_assert(cuda::kHipPciDomain == hipDeviceAttributePciDomainID);
static_assert(cuda::kHipRangeStart == HIP_POINTER_ATTRIBUTE_RANGE_START_ADDR);
static_assert(sizeof(cuda::PointerAttributes) == sizeof(hipPointerAttribute_t));
static_assert(offsetof(cuda::PointerAttributes, type) == offsetof(hipPointerAttribute_t, type));
static_assert(offsetof(cuda::PointerAttributes, device) == offsetof(hipPointerAttribute_t, device));

// What csrc/cuda/driver.h takes from CUDA and HIP has too.
static_assert(cuda::kSuccess == hipSuccess);
static_assert(cuda::kNotReady == hipErrorNotReady);
static_assert(cuda::kHostMemory == hipMemoryTypeHost);
static_assert(cuda::kDeviceMemory == hipMemoryTypeDevice);
static_assert(cuda::kStreamNonBlocking == hipStreamNonBlocking);
static_assert(cuda::kEventDefault == hipEventDefault);
static_assert(cuda::kEventDisableTiming == hipEventDisableTiming);
static_assert(cuda::kRegisterPortable == hipHostRegisterPortable);
static_assert(cuda::kRegisterMapped == hipHostRegisterMapped);
static_assert(cuda::kCaptureRelaxed == hipStreamCaptureModeRelaxed);
static_assert(hipStreamCaptureStatusNone == 0);

}  // namespace
