#pragma once

#include <memory>

#include "device/device.h"

namespace kvswap {

// Host memory as a device: a copy is a memcpy in the calling thread, and an event is the time at
// which it was recorded. With cpu_is_late() a stream keeps what it is given until catch_up(), or
// until wait_event() for a stream of the caller. Other streams are null.
std::unique_ptr<Device> make_host_device();

}  // namespace kvswap
