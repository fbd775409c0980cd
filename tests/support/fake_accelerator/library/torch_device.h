// What PyTorch's parts of the accelerator share.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "device.h"

namespace fake_accelerator {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

int current_device();
StreamId current_stream(int device);  // of the calling thread
void reset_current();                 // of the calling thread: device 0 and the default streams

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();

// Notes that a stream uses the memory, which is freed after what the stream has to do then.
void record_stream(const c10::DataPtr& memory, int device, StreamId stream);

}  // namespace fake_accelerator
