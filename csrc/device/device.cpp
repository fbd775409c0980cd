#include "device/device.h"

#include <map>
#include <mutex>
#include <utility>

#include "check.h"
#include "copy/address_check.h"
#include "device/cuda.h"
#include "device/host.h"
#include "device/queued.h"

namespace kvswap {
namespace {

std::mutex mutex;

// Never destroyed: threads may still copy while the process exits.
auto& devices() {
  static auto& made = *new std::map<std::pair<DeviceKind, int>, std::unique_ptr<Device>>;
  return made;
}

}  // namespace

void Device::check_addresses(const FragmentList& fragments) {
  AddressMap addresses;
  kvswap::check_addresses(fragments, addresses);
}

Device& find_device(DeviceKind kind, int index) {
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Device>& device = devices()[{kind, index}];
  if (device == nullptr && kind == DeviceKind::kHost) device = make_host_device();
  if (device == nullptr && kind == DeviceKind::kCuda) device = make_cuda_device(index);
  KVSWAP_CHECK(device != nullptr, "there is no queued device ", index);
  return *device;
}

QueuedDevice& make_queued_device(int index, const std::string& name, bool has_batch) {
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Device>& device = devices()[{DeviceKind::kQueued, index}];
  if (device != nullptr) fail<ValueError>("queued device ", index, " exists: ", device->name());
  auto made = std::make_unique<QueuedDevice>(index, name, has_batch);
  QueuedDevice& queued = *made;
  device = std::move(made);
  return queued;
}

}  // namespace kvswap
