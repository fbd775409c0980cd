#pragma once

#include <memory>

#include "device/device.h"

namespace kvswap {

// Host memory as a device: a copy is a memcpy in the calling thread. All streams are null, and an
// event is the time at which it was recorded.
std::unique_ptr<Device> make_host_device();

}  // namespace kvswap
