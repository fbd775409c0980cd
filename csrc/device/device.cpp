#include "device/device.h"

#include <map>
#include <mutex>

#include "copy/address_check.h"
#include "device/cuda.h"
#include "device/host.h"

namespace kvswap {

void Device::check_addresses(const FragmentList& fragments) {
  AddressMap addresses;
  kvswap::check_addresses(fragments, addresses);
}

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
