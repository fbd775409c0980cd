// Compares the prototypes of csrc/cuda/driver.h with the headers of a CUDA release. Only compiled:
// tests/unit/test_binary.py runs the compiler over it once for each release.
#include <cuda.h>

#include <cstddef>

#include "../../csrc/cuda/driver.h"
#include "same_abi.h"

namespace {

using namespace kvswap;

#define SAME(member, function) \
  static_assert(SameAbi<decltype(cuda::Driver::member), decltype(&function)>::value, #function)

SAME(get_error_name, cuGetErrorName);
SAME(get_error_string, cuGetErrorString);
SAME(get_version, cuDriverGetVersion);
SAME(retain_primary_context, cuDevicePrimaryCtxRetain);
SAME(push_context, cuCtxPushCurrent);
SAME(pop_context, cuCtxPopCurrent);
SAME(can_access_peer, cuDeviceCanAccessPeer);
SAME(enable_peer_access, cuCtxEnablePeerAccess);
SAME(get_pointer_attributes, cuPointerGetAttributes);
SAME(copy_async, cuMemcpyAsync);
SAME(copy_peer_async, cuMemcpyPeerAsync);
SAME(copy_strided_async, cuMemcpy3DAsync);
SAME(create_stream, cuStreamCreateWithPriority);
SAME(destroy_stream, cuStreamDestroy);
SAME(synchronize_stream, cuStreamSynchronize);
SAME(query_stream, cuStreamQuery);
SAME(is_capturing, cuStreamIsCapturing);
SAME(exchange_capture_mode, cuThreadExchangeStreamCaptureMode);
SAME(create_event, cuEventCreate);
SAME(destroy_event, cuEventDestroy);
SAME(record_event, cuEventRecord);
SAME(query_event, cuEventQuery);
SAME(elapsed_time, cuEventElapsedTime);
SAME(wait_event, cuStreamWaitEvent);
SAME(allocate, cuMemAlloc);
SAME(free, cuMemFree);
SAME(share_memory, cuIpcGetMemHandle);
SAME(open_memory, cuIpcOpenMemHandle);
SAME(close_memory, cuIpcCloseMemHandle);
SAME(load_module, cuModuleLoadData);
SAME(get_function, cuModuleGetFunction);
SAME(set_function_attribute, cuFuncSetAttribute);
SAME(launch, cuLaunchKernel);
SAME(allocate_host, cuMemHostAlloc);
SAME(free_host, cuMemFreeHost);
SAME(register_host, cuMemHostRegister);
SAME(unregister_host, cuMemHostUnregister);
SAME(get_device_attribute, cuDeviceGetAttribute);
SAME(wait_value, cuStreamWaitValue64);
SAME(write_value, cuStreamWriteValue64);

static_assert(SameAbi<cuda::GetProcAddress, decltype(&cuGetProcAddress_v2)>::value);
static_assert(cuda::kLegacyStreamFlag == CU_GET_PROC_ADDRESS_LEGACY_STREAM);
static_assert(cuda::kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(cuda::kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(cuda::kRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(cuda::kRegisterPortable == CU_MEMHOSTALLOC_PORTABLE);
static_assert(cuda::kRegisterMapped == CU_MEMHOSTREGISTER_DEVICEMAP);
static_assert(cuda::kCaptureRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(cuda::kWaitUntilAtLeast == CU_STREAM_WAIT_VALUE_GEQ);
static_assert(cuda::kOpenWithAccess == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
static_assert(sizeof(cuda::MemoryHandle) == sizeof(CUipcMemHandle));
static_assert(cuda::kHas64BitMemoryOperations == CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS);
static_assert(cuda::kComputeCapabilityMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(cuda::kHasRegisteredAtSameAddress ==
              CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
static_assert(cuda::kPciBus == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID);
static_assert(cuda::kPciDevice == CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID);
static_assert(cuda::kPciDomain == CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID);
static_assert(cuda::kMaxDynamicSharedBytes == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
static_assert(cuda::kSuccess == CUDA_SUCCESS);
static_assert(cuda::kNotInitialized == CUDA_ERROR_NOT_INITIALIZED);
static_assert(cuda::kNotReady == CUDA_ERROR_NOT_READY);
static_assert(cuda::kPeerAccessAlreadyEnabled == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
static_assert(cuda::kNotSupported == CUDA_ERROR_NOT_SUPPORTED);
static_assert(cuda::kMemoryType == CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
static_assert(cuda::kDevicePointer == CU_POINTER_ATTRIBUTE_DEVICE_POINTER);
static_assert(cuda::kDeviceOrdinal == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
static_assert(cuda::kRangeStart == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR);
static_assert(cuda::kRangeSize == CU_POINTER_ATTRIBUTE_RANGE_SIZE);
static_assert(cuda::kMappingSize == CU_POINTER_ATTRIBUTE_MAPPING_SIZE);
static_assert(cuda::kMappingBase == CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR);
static_assert(cuda::kHostMemory == CU_MEMORYTYPE_HOST);
static_assert(cuda::kDeviceMemory == CU_MEMORYTYPE_DEVICE);
static_assert(sizeof(cuda::Address) == sizeof(CUdeviceptr));

static_assert(sizeof(cuda::StridedCopy) == sizeof(CUDA_MEMCPY3D));
static_assert(offsetof(cuda::StridedCopy, src.memory_type) ==
              offsetof(CUDA_MEMCPY3D, srcMemoryType));
static_assert(offsetof(cuda::StridedCopy, src.host) == offsetof(CUDA_MEMCPY3D, srcHost));
static_assert(offsetof(cuda::StridedCopy, src.device) == offsetof(CUDA_MEMCPY3D, srcDevice));
static_assert(offsetof(cuda::StridedCopy, src.pitch) == offsetof(CUDA_MEMCPY3D, srcPitch));
static_assert(offsetof(cuda::StridedCopy, src.height) == offsetof(CUDA_MEMCPY3D, srcHeight));
static_assert(offsetof(cuda::StridedCopy, dst.host) == offsetof(CUDA_MEMCPY3D, dstHost));
static_assert(offsetof(cuda::StridedCopy, dst.height) == offsetof(CUDA_MEMCPY3D, dstHeight));
static_assert(offsetof(cuda::StridedCopy, width) == offsetof(CUDA_MEMCPY3D, WidthInBytes));
static_assert(offsetof(cuda::StridedCopy, depth) == offsetof(CUDA_MEMCPY3D, Depth));

// The batch call came with 12.8, and CUDA 13 declares the signature that lost an argument.
#if CUDA_VERSION >= 12080
static_assert(cuda::kSourceOrderStream == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
static_assert(cuda::kSourceOrderAny == CU_MEMCPY_SRC_ACCESS_ORDER_ANY);
static_assert(sizeof(cuda::CopyAttributes) == sizeof(CUmemcpyAttributes));
static_assert(offsetof(cuda::CopyAttributes, source_order) ==
              offsetof(CUmemcpyAttributes, srcAccessOrder));
static_assert(offsetof(cuda::CopyAttributes, source_hint) ==
              offsetof(CUmemcpyAttributes, srcLocHint));
static_assert(offsetof(cuda::CopyAttributes, destination_hint) ==
              offsetof(CUmemcpyAttributes, dstLocHint));
static_assert(offsetof(cuda::CopyAttributes, flags) == offsetof(CUmemcpyAttributes, flags));
#if CUDA_VERSION < 13000
SAME(copy_batch_async, cuMemcpyBatchAsync);
#endif
#endif

}  // namespace
