#include "copy/address_map.h"

#include <algorithm>
#include <sstream>

#include "check.h"
#include "cuda/driver.h"

namespace kvswap {
namespace {

// Whether the device uses host memory that the driver knows at another address than the process.
bool is_elsewhere(uint64_t address) {
  int name = cuda::kDevicePointer;
  unsigned long long on_device = 0;
  void* value = &on_device;
  const cuda::Result result = cuda::driver().get_pointer_attributes(1, &name, &value, address);
  return result == cuda::kSuccess && on_device != 0 && on_device != address;
}

}  // namespace

AddressMap::AddressMap() : cuda_in_use_(cuda::is_initialised()) {}

Memory AddressMap::query(uint64_t address) const {
  unsigned type = 0;
  int device = -1;
  unsigned long long begin = 0;
  size_t bytes = 0;
  int names[] = {cuda::kMemoryType, cuda::kDeviceOrdinal, cuda::kRangeStart, cuda::kRangeSize};
  void* values[] = {&type, &device, &begin, &bytes};
  KVSWAP_DRIVER_CHECK(cuda::driver().get_pointer_attributes(4, names, values, address),
                      "cuPointerGetAttributes", " of address ", hex(address));
  Memory memory;
  if (type != cuda::kHostMemory && type != cuda::kDeviceMemory) return memory;
  if (type == cuda::kHostMemory && is_elsewhere(address)) {
    memory.begin = address;
    memory.end = address + 1;
    return memory;
  }
  memory.kind = type == cuda::kDeviceMemory ? MemoryKind::kDevice : MemoryKind::kPinned;
  memory.device = memory.on_device() ? device : -1;
  memory.begin = bytes != 0 ? begin : address;
  memory.end = bytes != 0 ? begin + bytes : address + 1;
  return memory;
}

Memory AddressMap::find(uint64_t address) {
  if (!cuda_in_use_) return {};
  const auto next =
      std::upper_bound(seen_.begin(), seen_.end(), address,
                       [](uint64_t value, const Memory& memory) { return value < memory.begin; });
  if (next != seen_.begin() && address < std::prev(next)->end) return *std::prev(next);
  const Memory memory = query(address);
  if (memory.kind != MemoryKind::kPageable) seen_.insert(next, memory);
  return memory;
}

uint64_t AddressMap::mapped_until(uint64_t address) const {
  unsigned long long begin = 0;
  size_t bytes = 0;
  int names[] = {cuda::kMappingBase, cuda::kMappingSize};
  void* values[] = {&begin, &bytes};
  KVSWAP_DRIVER_CHECK(cuda::driver().get_pointer_attributes(2, names, values, address),
                      "cuPointerGetAttributes", " of address ", hex(address));
  return bytes == 0 ? address : begin + bytes;
}

std::string AddressMap::describe(uint64_t address) {
  std::ostringstream text;
  text << hex(address);
  if (address == 0) return text.str() + " (null)";
  const Memory memory = find(address);
  switch (memory.kind) {
    case MemoryKind::kDevice:
      text << " (device " << memory.device << ", allocation ";
      break;
    case MemoryKind::kPinned:
      text << " (pinned host memory, allocation ";
      break;
    case MemoryKind::kPageable:
      if (memory.end != 0) return text.str() + " (host memory that the device has elsewhere)";
      return text.str() + " (pageable host memory or no memory at all: unknown to CUDA)";
  }
  text << hex(memory.begin) << " + " << memory.end - memory.begin << " bytes)";
  return text.str();
}

std::string hex(uint64_t address) {
  std::ostringstream text;
  text << "0x" << std::hex << address;
  return text.str();
}

}  // namespace kvswap
