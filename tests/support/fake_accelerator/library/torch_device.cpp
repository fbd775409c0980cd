// Devices, streams and events as PyTorch knows them.
#include "torch_device.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace fake_accelerator {
namespace {

thread_local int device_of_thread = 0;
thread_local std::array<StreamId, kDevices> streams_of_thread = {};

int checked(c10::DeviceIndex index) {
  return Device::at(index < 0 ? device_of_thread : index).index;
}

c10::Stream to_torch(int device, StreamId stream) {
  return c10::Stream(c10::Stream::UNSAFE, {kType, static_cast<c10::DeviceIndex>(device)}, stream);
}

struct Event {
  Event(int device, bool timed) : device(device), timed(timed) {
    Device::at(device).count([](Counters& counters) { ++counters.live_events; });
  }
  ~Event() {
    Device::at(device).count([](Counters& counters) { --counters.live_events; });
  }

  const int device;
  const bool timed;
  std::shared_ptr<Recording> last;
};

// What is newer than PyTorch 2.11 in the interface is not marked as an override.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Device getDevice() const override {
    return {kType, static_cast<c10::DeviceIndex>(device_of_thread)};
  }

  void setDevice(c10::Device device) const override { device_of_thread = checked(device.index()); }

  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) device_of_thread = device.index();
  }

  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override {
    const int index = checked(device.index());
    return to_torch(index, streams_of_thread[index]);
  }

  c10::Stream getDefaultStream(c10::Device device) const override {
    return to_torch(checked(device.index()), 0);
  }

  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }

  c10::Stream getNewStream(c10::Device device, int) const override {
    Device& on = Device::at(checked(device.index()));
    on.enter(Call::kCreateStream);
    return to_torch(on.index, on.create_stream());
  }

  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int index = checked(stream.device_index());
    const StreamId before = streams_of_thread[index];
    streams_of_thread[index] = stream.id();
    return to_torch(index, before);
  }

  void* getStreamNativeHandle(const c10::Stream stream) const {
    return Device::at(stream.device_index()).handle(stream.id());
  }

  bool queryStream(const c10::Stream& stream) const override {
    Device& on = Device::at(stream.device_index());
    on.enter(Call::kQuery);
    return on.is_idle(stream.id());
  }

  void synchronizeStream(const c10::Stream& stream) const override {
    Device& on = Device::at(stream.device_index());
    on.enter(Call::kSynchronize);
    on.synchronize(stream.id());
  }

  void synchronizeDevice(const c10::DeviceIndex index) const {
    Device& on = Device::at(checked(index));
    on.enter(Call::kSynchronize);
    on.synchronize();
  }

  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    record_stream(memory, stream.device_index(), stream.id());
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex index,
              const c10::EventFlag flag) const override {
    Device& on = Device::at(stream.device_index());
    TORCH_CHECK(index < 0 || index == on.index, "An event of device ", int{index},
                " cannot be recorded on a stream of device ", on.index);
    on.enter(Call::kRecord);
    auto recording = on.record(stream.id());
    if (!*event) *event = new Event(on.index, flag == c10::EventFlag::BACKEND_DEFAULT);
    static_cast<Event*>(*event)->last = std::move(recording);
  }

  void block(void* event, const c10::Stream& stream) const override {
    Device& on = Device::at(stream.device_index());
    on.enter(Call::kWait);
    if (event) on.wait(stream.id(), static_cast<Event*>(event)->last);
  }

  bool queryEvent(void* event) const override {
    if (!event) return true;
    Device& on = Device::at(static_cast<Event*>(event)->device);
    on.enter(Call::kQuery);
    return on.is_done(*static_cast<Event*>(event)->last);
  }

  void synchronizeEvent(void* event) const override {
    if (!event) return;
    Device& on = Device::at(static_cast<Event*>(event)->device);
    on.enter(Call::kSynchronize);
    const auto recording = static_cast<Event*>(event)->last;
    on.synchronize(*recording);
  }

  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const auto time_of = [](void* event) {
      TORCH_CHECK(event, "The time between events needs events that were recorded");
      const Event& of = *static_cast<Event*>(event);
      TORCH_CHECK(of.timed, "The time between events needs events with enable_timing=True");
      TORCH_CHECK(Device::at(of.device).is_done(*of.last),
                  "The time between events needs events that have happened");
      return of.last->time;
    };
    const auto between = time_of(second) - time_of(first);
    return std::chrono::duration<double, std::milli>(between).count();
  }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
};

[[maybe_unused]] const c10::impl::DeviceGuardImplRegistrar has_guard(kType, new Guard);

template <typename Interface>
struct Hooks : Interface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(device_of_thread);
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    device_of_thread = checked(index);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = getCurrentDevice();
    setCurrentDevice(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* address) const override {
    return find_pinned(address, 1) != nullptr;
  }
  at::Device getDeviceFromPtr(void* address) const override {
    const int device = device_of(address);
    TORCH_CHECK(device >= 0, "There is no memory of a device at ", address);
    return {kType, static_cast<c10::DeviceIndex>(device)};
  }
};

struct PrivateUse1Hooks final : Hooks<at::PrivateUse1HooksInterface> {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

struct CudaHooks final : Hooks<at::CUDAHooksInterface> {
  bool hasCUDA() const override { return true; }
};

[[maybe_unused]] const bool has_hooks = [] {
  if (kType == c10::DeviceType::PrivateUse1) {
    at::RegisterPrivateUse1HooksInterface(new PrivateUse1Hooks);
  } else {
    at::CUDAHooksRegistry()->Register(
        "CUDAHooks", [](at::CUDAHooksArgs) { return std::make_unique<CudaHooks>(); });
  }
  return true;
}();

}  // namespace

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto memory = at::empty({static_cast<int64_t>(bytes)},
                          at::TensorOptions().dtype(at::kByte).device(storage.device()));
  const auto common = static_cast<int64_t>(std::min(bytes, storage.nbytes()));
  auto before = at::empty({0}, memory.options()).set_(storage, 0, {common}, {1});
  memory.narrow(0, 0, common).copy_(before);
  before.reset();
  storage.unsafeGetStorageImpl()->set_data_ptr(
      std::move(memory.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
  storage.set_nbytes(bytes);
}

int current_device() { return device_of_thread; }

StreamId current_stream(int device) { return streams_of_thread[device]; }

void reset_current() {
  device_of_thread = 0;
  streams_of_thread = {};
}

}  // namespace fake_accelerator
