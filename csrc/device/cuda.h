#pragma once

#include <cstdint>
#include <memory>

#include "device/device.h"

namespace kvswap {

// A CUDA device, by the driver: csrc/cuda has its calls, csrc/copy its copies. Does not initialise
// CUDA; the first call that needs the device does.
std::unique_ptr<Device> make_cuda_device(int index);

// Pins host memory of the process for all its GPUs, and undoes that. `device` is asked. Any thread.
// Blocks; a large range takes seconds. register_host() throws NotImplementedError where GPUs take
// no memory of the process, or use other addresses for it: then only memory from
// Device::allocate_host() is pinned.
void register_host(int device, void* address, uint64_t bytes);
void unregister_host(int device, void* address);
// Where the pinned piece that contains the address ends: one registration or allocation, from which
// no copy may run into the next. 0 if the address is not pinned.
uint64_t pinned_until(int device, uint64_t address);

}  // namespace kvswap
