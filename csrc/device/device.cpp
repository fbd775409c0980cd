#include "device/device.h"

#include <map>
#include <mutex>
#include <utility>

#include "device/cuda.h"
#include "device/host.h"

namespace kvswap {
namespace {

std::mutex mutex;

// Never destroyed: threads may still copy while the process exits.
auto& devices() {
  static auto& made = *new std::map<std::pair<DeviceKind, int>, std::unique_ptr<Device>>;
  return made;
}

}  // namespace

Allocations Device::find_allocations(const std::vector<uint64_t>& cache,
                                     const std::vector<uint64_t>& host) {
  return {std::vector<uint64_t>(cache.size()), std::vector<uint64_t>(host.size()), false};
}

Device& find_device(DeviceKind kind, int index) {
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Device>& device = devices()[{kind, index}];
  if (device == nullptr)
    device = kind == DeviceKind::kHost ? make_host_device() : make_cuda_device(index);
  return *device;
}

}  // namespace kvswap
