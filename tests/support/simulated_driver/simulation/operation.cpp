#include "operation.h"

#include <cstring>

namespace simulated {

void Copy::run() const {
  const void* source = early.empty() ? reinterpret_cast<const void*>(src) : early.data();
  std::memcpy(reinterpret_cast<void*>(dst), source, bytes);
}

bool Operation::ready() const {
  if (kind == kWait) return record->happened;
  if (kind == kHold) return *released;
  if (kind != kWaitValue) return true;
  const uint64_t found = __atomic_load_n(reinterpret_cast<uint64_t*>(address), __ATOMIC_ACQUIRE);
  // At least the value, cyclic as in the driver.
  return static_cast<int64_t>(found - value) >= 0;
}

bool Operation::touches(uint64_t begin, uint64_t end) const {
  if (kind == kWaitValue || kind == kWriteValue) return address >= begin && address < end;
  for (const Copy& copy : copies) {
    if (copy.dst < end && begin < copy.dst + copy.bytes) return true;
    if (copy.src < end && begin < copy.src + copy.bytes) return true;
  }
  for (const Coding& coding : codings) {
    for (const auto& [first, last] : coding.memory) {
      if (first < end && begin < last) return true;
    }
  }
  return false;
}

}  // namespace simulated
