#include "copy/address_map.h"

#include <algorithm>
#include <sstream>

#include "check.h"
#include "cuda/driver.h"

namespace kvswap {
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
  if (memory.end != 0) seen_.insert(next, memory);
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
