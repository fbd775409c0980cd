// What PyTorch's parts of the accelerator share.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include "device.h"

namespace fake_accelerator {

// FAKE_TYPE: the type of device for PyTorch. It is PrivateUse1, or CUDA, to stand in for the GPUs
// of a PyTorch for ROCm.
constexpr c10::DeviceType kType = c10::DeviceType::FAKE_TYPE;
constexpr c10::DispatchKey kKey = c10::DispatchKey::FAKE_TYPE;

int current_device();
StreamId current_stream(int device);  // of the calling thread
void reset_current();                 // of the calling thread: device 0 and the default streams

// Gives a storage of a device this many bytes of memory, with the bytes that fit.
void resize_storage(const c10::Storage& storage, size_t bytes);

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();

// Notes that a stream uses the memory, which is freed after what the stream has to do then.
void record_stream(const c10::DataPtr& memory, int device, StreamId stream);

}  // namespace fake_accelerator
