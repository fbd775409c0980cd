// Copies of addresses in one call, as drivers of vendors have them.
#pragma once

#include <cstdint>

#include "device.h"

namespace fake_accelerator {

// Queues copies between pinned memory of the host and the device, in either direction. They run in
// another order than that of the call, because nothing promises the order. Throws if an address is
// of neither, and queues nothing then.
void copy_batch(Device& device, StreamId stream, int64_t count, char* const* dst, char* const* src,
                const int64_t* sizes);

}  // namespace fake_accelerator
