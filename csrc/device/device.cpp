#include "device/device.h"

#include <map>
#include <mutex>

#include "device/cuda.h"
#include "device/host.h"

namespace kvswap {

Device& find_device(int index) {
  static std::mutex mutex;
  // Never destroyed: threads may still copy while the process exits.
  static auto& devices = *new std::map<int, std::unique_ptr<Device>>;
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Device>& device = devices[index];
  if (device == nullptr) device = index < 0 ? make_host_device() : make_cuda_device(index);
  return *device;
}

}  // namespace kvswap
