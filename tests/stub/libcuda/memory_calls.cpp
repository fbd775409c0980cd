#include <cstdlib>
#include <cstring>

#include "calls.h"

namespace stub {
namespace {

constexpr unsigned kHostMemory = 1;

int get_pointer_attributes(unsigned count, int* names, void** values, unsigned long long address) {
  const Call call("cuPointerGetAttributes");
  if (call.result) return call.result;
  if (!device().initialized) return kNotInitialized;
  const Range found = device().memory.find(address);
  for (unsigned i = 0; i < count; ++i) {
    if (names[i] == 2) *static_cast<unsigned*>(values[i]) = found.type;
    if (names[i] == 9) *static_cast<int*>(values[i]) = found.device;
    if (names[i] == 11 || names[i] == 19)
      *static_cast<unsigned long long*>(values[i]) = found.begin;
    if (names[i] == 12 || names[i] == 18)
      *static_cast<size_t*>(values[i]) = found.end - found.begin;
  }
  return kSuccess;
}

int allocate(void** address, size_t bytes, unsigned) {
  const Call call("cuMemHostAlloc");
  if (call.result) return call.result;
  *address = std::malloc(bytes);
  std::memset(*address, 0xcd, bytes);
  const auto begin = reinterpret_cast<uint64_t>(*address);
  device().memory.add({begin, begin + bytes, kHostMemory, 0, Range::kAllocated});
  device().log.add("allocate ", bytes, " bytes of host memory");
  return kSuccess;
}

int forget(const char* name, void* address, Range::Origin origin, int refusal) {
  const Call call(name);
  if (call.result) return call.result;
  const auto begin = reinterpret_cast<uint64_t>(address);
  const Range found = device().memory.find(begin);
  if (found.type == 0 || found.begin != begin || found.origin != origin) return refusal;
  const bool allocated = origin == Range::kAllocated;
  device().log.add(allocated ? "free " : "unregister ", found.end - begin, " bytes of host memory");
  if (device().in_use(begin, found.end)) {
    device().log.violation("host memory was let go with work on it pending");
  } else if (allocated) {
    std::free(address);
  }
  device().memory.remove(begin);
  return kSuccess;
}

int free_host(void* address) {
  return forget("cuMemFreeHost", address, Range::kAllocated, kInvalidValue);
}

int unregister(void* address) {
  return forget("cuMemHostUnregister", address, Range::kRegistered, kNotRegistered);
}

int register_host(void* address, size_t bytes, unsigned) {
  const Call call("cuMemHostRegister");
  if (call.result) return call.result;
  const auto begin = reinterpret_cast<uint64_t>(address);
  if (bytes == 0) return kInvalidValue;
  if (device().memory.overlaps(begin, begin + bytes)) return kAlreadyRegistered;
  device().memory.add({begin, begin + bytes, kHostMemory, 0, Range::kRegistered});
  device().log.add("register ", bytes, " bytes of host memory");
  return kSuccess;
}

}  // namespace

Functions memory_calls() {
  return {
      {"cuPointerGetAttributes", reinterpret_cast<void*>(&get_pointer_attributes)},
      {"cuMemHostAlloc", reinterpret_cast<void*>(&allocate)},
      {"cuMemFreeHost", reinterpret_cast<void*>(&free_host)},
      {"cuMemHostRegister", reinterpret_cast<void*>(&register_host)},
      {"cuMemHostUnregister", reinterpret_cast<void*>(&unregister)},
  };
}

}  // namespace stub
