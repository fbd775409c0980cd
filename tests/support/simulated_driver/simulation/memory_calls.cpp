#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "calls.h"

namespace simulated {
namespace {

constexpr unsigned kHostMemory = 1, kDeviceMemory = 2;
constexpr uint64_t kShift = uint64_t{1} << 50;  // to addresses that no process has

int get_pointer_attributes(unsigned count, int* names, void** values, unsigned long long address) {
  const Call call("cuPointerGetAttributes");
  if (call.result) return call.result;
  if (!device().initialized) return kNotInitialized;
  const Range found = device().memory.find(address);
  for (unsigned i = 0; i < count; ++i) {
    if (names[i] == 2) *static_cast<unsigned*>(values[i]) = found.type;
    if (names[i] == 3) {
      *static_cast<unsigned long long*>(values[i]) = found.type == 0 ? 0 : address + found.shift;
    }
    if (names[i] == 9) *static_cast<int*>(values[i]) = found.device;
    if (names[i] == 11 || names[i] == 19)
      *static_cast<unsigned long long*>(values[i]) = found.begin;
    if (names[i] == 12 || names[i] == 18)
      *static_cast<size_t*>(values[i]) = found.end - found.begin;
  }
  return kSuccess;
}

const char* noun(unsigned type) { return type == kHostMemory ? " bytes of host memory" : " bytes"; }

uint64_t allocate(size_t bytes, unsigned type) {
  void* address = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(address, 0xcd, std::min(bytes, size_t{1} << 20));  // much memory stays untouched
  const auto begin = reinterpret_cast<uint64_t>(address);
  device().memory.add(
      {begin, begin + bytes, type, std::max(current_context(), 0), Range::kAllocated});
  device().log.add("allocate ", bytes, noun(type));
  return begin;
}

int allocate_host(void** address, size_t bytes, unsigned) {
  const Call call("cuMemHostAlloc");
  if (call.result) return call.result;
  *address = reinterpret_cast<void*>(allocate(bytes, kHostMemory));
  return kSuccess;
}

int allocate_device(unsigned long long* address, size_t bytes) {
  const Call call("cuMemAlloc");
  if (call.result) return call.result;
  if (bytes == 0) return kInvalidValue;
  if (!device().faults.has_memory(bytes, current_context())) return kOutOfMemory;
  *address = allocate(bytes, kDeviceMemory);
  return kSuccess;
}

int forget(const char* name, void* address, Range::Origin origin, int refusal) {
  const Call call(name);
  if (call.result) return call.result;
  const auto begin = reinterpret_cast<uint64_t>(address);
  const Range found = device().memory.find(begin);
  if (found.type == 0 || found.begin != begin || found.origin != origin) {
    if (device().memory.was_let_go(begin))
      device().log.violation(name, " of the same memory twice");
    return refusal;
  }
  const bool allocated = origin == Range::kAllocated;
  device().log.add(allocated ? "free " : "unregister ", found.end - begin, noun(found.type));
  if (device().in_use(begin, found.end)) {
    const char* side = found.type == kHostMemory ? "host" : "GPU";
    device().log.violation(side, " memory was let go with work on it pending");
  } else if (allocated) {
    std::free(address);
  }
  for (const auto& [ordinal, address] : device().opened) {
    if (address == begin)
      device().log.violation("GPU ", ordinal, " has memory open that was freed");
  }
  device().memory.remove(begin);
  return kSuccess;
}

int free_host(void* address) {
  return forget("cuMemFreeHost", address, Range::kAllocated, kInvalidValue);
}

int free_device(unsigned long long address) {
  return forget("cuMemFree", reinterpret_cast<void*>(address), Range::kAllocated, kInvalidValue);
}

int unregister(void* address) {
  return forget("cuMemHostUnregister", address, Range::kRegistered, kNotRegistered);
}

int register_host(void* address, size_t bytes, unsigned) {
  const Call call("cuMemHostRegister");
  if (call.result) return call.result;
  const auto begin = reinterpret_cast<uint64_t>(address);
  if (bytes == 0) return kInvalidValue;
  if (!device().memory.registers) return kNotSupported;
  if (device().memory.overlaps(begin, begin + bytes)) return kAlreadyRegistered;
  if (!device().memory.takes(bytes)) return kOutOfMemory;
  const uint64_t shift = device().attributes[kRegisteredAtSameAddress] ? 0 : kShift;
  device().memory.add({begin, begin + bytes, kHostMemory, 0, Range::kRegistered, shift});
  device().log.add("register ", bytes, " bytes of host memory");
  return kSuccess;
}

// CUipcMemHandle. The handle of an allocation begins with its address: here all processes are one.
struct Handle {
  uint64_t address;
  unsigned char rest[56];
};

int share(Handle* handle, unsigned long long address) {
  const Call call("cuIpcGetMemHandle");
  if (call.result) return call.result;
  const Range found = device().memory.find(address);
  if (found.type != kDeviceMemory || found.origin != Range::kAllocated) return kInvalidValue;
  *handle = {found.begin, {}};
  return kSuccess;
}

int open(unsigned long long* address, Handle handle, unsigned flags) {
  const Call call("cuIpcOpenMemHandle");
  if (call.result) return call.result;
  const int ordinal = current_context(), owner = device().memory.find(handle.address).device;
  if (ordinal == kNoContext) return kInvalidContext;
  if (flags != 1 || owner < 0) return kInvalidValue;
  if (device().unreachable.count(std::minmax(ordinal, owner))) return kPeerAccessUnsupported;
  device().accesses.emplace(ordinal, owner);
  device().opened.emplace(ordinal, handle.address);
  *address = handle.address;
  return kSuccess;
}

int close(unsigned long long address) {
  const Call call("cuIpcCloseMemHandle");
  if (call.result) return call.result;
  return device().opened.erase({current_context(), address}) == 0 ? kInvalidValue : kSuccess;
}

}  // namespace

Functions memory_calls() {
  return {
      SIMULATED(cuPointerGetAttributes, get_pointer_attributes),
      SIMULATED(cuMemHostAlloc, allocate_host),
      SIMULATED(cuMemAlloc, allocate_device),
      SIMULATED(cuMemFree, free_device),
      SIMULATED(cuMemFreeHost, free_host),
      SIMULATED(cuMemHostRegister, register_host),
      SIMULATED(cuMemHostUnregister, unregister),
      SIMULATED(cuIpcGetMemHandle, share),
      SIMULATED(cuIpcOpenMemHandle, open),
      SIMULATED(cuIpcCloseMemHandle, close),
  };
}

}  // namespace simulated
