// The allocators of PyTorch for memory of the devices and for pinned memory of the host.
#include <c10/core/CachingDeviceAllocator.h>

#include "memory.h"
#include "torch_device.h"

namespace fake_accelerator {
namespace {

using Owner = std::shared_ptr<Block>;

// The tensor is gone, the streams that use its memory may have work that uses it still.
void free_in_order(void* context) {
  std::unique_ptr<Owner> owner(static_cast<Owner*>(context));
  std::vector<std::pair<int, StreamId>> streams;
  {
    std::lock_guard<std::mutex> lock(memory_lock());
    streams = (*owner)->streams;
  }
  for (const auto& [device, stream] : streams) Device::at(device).release(stream, *owner);
}

// Caches nothing: memory is freed as soon as the streams that use it got there.
struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int index = current_device();
    const c10::Device device(kType, static_cast<c10::DeviceIndex>(index));
    if (!bytes) return {nullptr, device};
    Device::at(index).enter(Call::kAllocate);
    auto block = fake_accelerator::allocate(index, bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, block, "fakeaccel:", index, " has no ", bytes,
                     " bytes left");
    block->streams.emplace_back(index, current_stream(index));
    void* address = block->address;
    return {address, new Owner(std::move(block)), free_in_order, device};
  }

  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "Device memory is copied by operators");
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    record_stream(memory, stream.device_index(), stream.id());
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const Usage usage = memory_usage(Device::at(device).index);
    c10::CachingDeviceAllocator::DeviceStats stats;
    constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    stats.allocation[kAll].current = usage.blocks;
    for (auto* of_bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes,
                           &stats.requested_bytes})
      (*of_bytes)[kAll].current = usage.bytes;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};

// As with PyTorch's own allocators of pinned memory, copies that run keep the memory.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, c10::kCPU};
    auto* owner = new std::shared_ptr<Pinned>(allocate_pinned(bytes));
    return {(*owner)->address, owner,
            [](void* context) { delete static_cast<std::shared_ptr<Pinned>*>(context); },
            c10::kCPU};
  }
  void copy_data(void* dst, const void* src, size_t bytes) const override {
    default_copy_data(dst, src, bytes);
  }
};

[[maybe_unused]] const bool registered = [] {
  c10::SetAllocator(kType, device_allocator());
  return true;
}();

}  // namespace

c10::Allocator* device_allocator() {
  static auto* allocator = new DeviceAllocator;
  return allocator;
}

c10::Allocator* pinned_allocator() {
  static auto* allocator = new PinnedAllocator;
  return allocator;
}

void record_stream(const c10::DataPtr& memory, int device, StreamId stream) {
  if (memory.get_deleter() != free_in_order) return;  // empty
  std::lock_guard<std::mutex> lock(memory_lock());
  (*static_cast<Owner*>(memory.get_context()))->streams.emplace_back(device, stream);
}

}  // namespace fake_accelerator
