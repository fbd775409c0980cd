#pragma once

#include <memory>

#include "device/device.h"

namespace kvswap {

// A CUDA device, by the driver: csrc/cuda has its calls, csrc/copy its copies. Does not initialise
// CUDA; the first call that needs the device does.
std::unique_ptr<Device> make_cuda_device(int index);

}  // namespace kvswap
