#include "offload/state_memory.h"

#include <cstring>
#include <exception>

#include "check.h"
#include "host_memory.h"

namespace kvswap {

StateMemory::StateMemory(Device& device, size_t count)
    : device_(device),
      count_(count),
      states_(static_cast<uint8_t*>(map_host(-1, count, /*on_huge_pages=*/false))) {
  if (device_.is_synchronous()) return;  // the calling thread copies
  try {
    device_.register_host(states_, count_);
  } catch (const NotImplementedError&) {
    unmap_host(states_, count_);
    states_ = static_cast<uint8_t*>(device_.allocate_host(count_));
    std::memset(states_, 0, count_);
    is_allocated_ = true;
  } catch (...) {
    unmap_host(states_, count_);
    throw;
  }
}

StateMemory::~StateMemory() {
  if (states_ == nullptr) return;
  try {
    if (is_allocated_) {
      device_.free_host(states_);
    } else {
      if (!device_.is_synchronous()) device_.unregister_host(states_);
      unmap_host(states_, count_);
    }
  } catch (const std::exception&) {  // the driver still has it
  }
}

}  // namespace kvswap
