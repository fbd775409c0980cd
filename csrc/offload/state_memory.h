#pragma once

#include <cstddef>
#include <cstdint>

#include "device/device.h"

namespace kvswap {

// Slot states, zeros at first, in memory that host and device write.
class StateMemory {
 public:
  // The device outlives it. Its context is current.
  StateMemory(Device& device, size_t count);
  ~StateMemory();
  StateMemory(const StateMemory&) = delete;
  StateMemory& operator=(const StateMemory&) = delete;

  uint8_t* states() const { return states_; }
  // Leaves the memory mapped for ever: the device is lost, and may still write it.
  void leak() noexcept { states_ = nullptr; }

 private:
  Device& device_;
  const size_t count_;
  uint8_t* states_;
  bool is_allocated_ = false;  // by the device
};

}  // namespace kvswap
