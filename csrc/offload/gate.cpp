#include "offload/gate.h"

#include <algorithm>
#include <optional>

namespace kvswap {

volatile uint64_t* GateWords::take(int count) {
  constexpr int kWordsAtOnce = 512;  // a page
  if (left_ < count) {
    const int size = std::max(count, kWordsAtOnce);
    void* memory = nullptr;
    KVSWAP_DRIVER_CHECK(
        cuda::driver().allocate_host(&memory, size * sizeof(uint64_t), cuda::kRegisterPortable),
        "cuMemHostAlloc of a gate");
    next_ = static_cast<volatile uint64_t*>(memory);
    left_ = size;
  }
  volatile uint64_t* const taken = next_;
  for (int i = 0; i < count; ++i) taken[i] = 1;
  next_ += count;
  left_ -= count;
  return taken;
}

Gate::Gate(int device, int layer_groups, GateWords& words)
    : device(device), layer_groups(layer_groups) {
  const cuda::Driver& driver = cuda::driver();
  int supported = 0;
  KVSWAP_DRIVER_CHECK(
      driver.get_device_attribute(&supported, cuda::kHas64BitMemoryOperations, device),
      "cuDeviceGetAttribute");
  KVSWAP_CHECK(supported && driver.wait_value && driver.write_value, "the driver of CUDA device ",
               device,
               " has no 64-bit stream memory operations, which a gate needs; let a stream wait for "
               "each job instead");
  try {
    opener_ = cuda::create_stream();
    for (cuda::Event* event : {&closed_, &opened_}) {
      KVSWAP_DRIVER_CHECK(driver.create_event(event, cuda::kEventDisableTiming), "cuEventCreate");
    }
    words_ = words.take(layer_groups);
  } catch (...) {
    destroy();
    throw;
  }
}

Gate::~Gate() { destroy(); }

void Gate::release(Gate* gate) {
  if (gate->references_.fetch_sub(1) > 1) return;
  std::optional<cuda::ContextGuard> context;
  try {
    context.emplace(gate->device);
  } catch (const std::exception&) {  // a lost device, where there is nothing to free any more
  }
  delete gate;
}

// The driver keeps what is destroyed until the work that uses it has ended.
void Gate::destroy() {
  for (const cuda::Event event : {closed_, opened_}) {
    if (event != nullptr) cuda::driver().destroy_event(event);
  }
  if (opener_ != nullptr) cuda::driver().destroy_stream(opener_);
}

void Gate::set(int layer_group, uint64_t value, cuda::Stream stream) const {
  const auto address = reinterpret_cast<cuda::Address>(&words_[layer_group]);
  KVSWAP_DRIVER_CHECK(cuda::driver().write_value(stream, address, value, 0),
                      "cuStreamWriteValue64");
}

void Gate::close(const cuda::StreamRef& current) {
  const cuda::ContextGuard context(current.device);
  if (used_) cuda::wait_event(current, opened_);
  try {
    for (int layer_group = 0; layer_group < layer_groups; ++layer_group)
      set(layer_group, 0, current.handle);
    KVSWAP_DRIVER_CHECK(cuda::driver().record_event(closed_, current.handle), "cuEventRecord");
  } catch (...) {
    reopen(current.handle);
    throw;
  }
  busy_ = true;
}

// Opens what was closed. If the driver refuses that, open() tries it again after this point of the
// stream.
void Gate::reopen(cuda::Stream current) noexcept {
  try {
    for (int layer_group = 0; layer_group < layer_groups; ++layer_group)
      set(layer_group, 1, current);
  } catch (const std::exception& error) {
    cuda::driver().record_event(closed_, current);
    problem_ = Reason(error);
    busy_ = true;
  }
}

void Gate::enqueue_opening(const Transfer* transfer) {
  const cuda::Driver& driver = cuda::driver();
  KVSWAP_DRIVER_CHECK(driver.wait_event(opener_, closed_, 0), "cuStreamWaitEvent");
  for (int layer_group = 0; layer_group < layer_groups; ++layer_group) {
    if (transfer != nullptr) {
      KVSWAP_DRIVER_CHECK(driver.wait_event(opener_, transfer->ends[layer_group], 0),
                          "cuStreamWaitEvent");
    }
    set(layer_group, 1, opener_);
  }
  KVSWAP_DRIVER_CHECK(driver.record_event(opened_, opener_), "cuEventRecord");
  used_ = true;
}

Reason Gate::open_after(const Transfer& transfer) noexcept {
  try {
    enqueue_opening(&transfer);
    return {};
  } catch (const std::exception& error) {
    return Reason(error);
  }
}

void Gate::opened() noexcept {
  busy_ = false;
  problem_ = {};
}

bool Gate::open() noexcept {
  try {
    enqueue_opening(nullptr);
    opened();
    return true;
  } catch (const std::exception& error) {
    problem_ = Reason(error);
    return false;
  }
}

void Gate::let_through() noexcept {
  for (int layer_group = 0; layer_group < layer_groups; ++layer_group) words_[layer_group] = 1;
  opened();
}

void Gate::wait(int layer_group, const cuda::StreamRef& stream) const {
  const cuda::ContextGuard context(stream.device);
  const auto address = reinterpret_cast<cuda::Address>(&words_[layer_group]);
  KVSWAP_DRIVER_CHECK(cuda::driver().wait_value(stream.handle, address, 1, cuda::kWaitUntilAtLeast),
                      "cuStreamWaitValue64");
}

}  // namespace kvswap
