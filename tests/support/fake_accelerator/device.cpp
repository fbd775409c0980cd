// A device of PyTorch in host memory. What its streams are given runs late: only when the host
// waits for the device or asks it something. FAKE_TYPE is its type for PyTorch: PrivateUse1, or
// CUDA to stand in for the GPUs of a PyTorch for ROCm.
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace {

constexpr auto kType = c10::DeviceType::FAKE_TYPE;
constexpr auto kKey = c10::DispatchKey::FAKE_TYPE;
const c10::Device kDevice(kType, 0);

// Streams.

using Clock = std::chrono::steady_clock;
using StreamId = int64_t;  // 0 is the default stream

struct Recording {  // of an event
  bool done = false;
  Clock::time_point time;
};

struct Hold {
  const bool until_waited;  // ends when the host waits for any stream
  bool released = false;
};

struct Work {
  std::string what;
  std::function<void()> run = [] {};
  std::function<bool()> is_ready = [] { return true; };
};

// Used until the process ends, so nothing destroys it.
struct State {
  std::recursive_mutex mutex;  // guards all
  std::map<StreamId, std::deque<Work>> streams;
  StreamId last_stream = 0;
  std::vector<std::shared_ptr<Hold>> holds;
  std::string error;                     // of the first work that failed
  char* memory = nullptr;                // the next address
  std::map<const char*, size_t> blocks;  // of the device: address and size
  std::map<const char*, size_t> pinned;
};
State& state = *new State;
using Lock = std::lock_guard<std::recursive_mutex>;

thread_local StreamId current_stream = 0;

void submit(StreamId stream, Work work) {
  const Lock lock(state.mutex);
  state.streams[stream].push_back(std::move(work));
}

// Runs all that can run.
void advance() {
  for (bool has_run = true; has_run;) {
    has_run = false;
    for (auto& [id, works] : state.streams)
      for (; !works.empty() && works.front().is_ready(); works.pop_front(), has_run = true) try {
          works.front().run();
        } catch (const std::exception& error) {
          const std::string text = error.what();
          if (state.error.empty())
            state.error = "stream " + std::to_string(id) + ", " + works.front().what + ": " +
                          text.substr(0, text.find('\n'));
        }
  }
}

std::string pending() {
  std::string text;
  for (const auto& [id, works] : state.streams)
    for (const Work& work : works) text += "stream " + std::to_string(id) + ": " + work.what + "\n";
  return text;
}

template <class Done>
void wait_on_host(Done done) {
  const Lock lock(state.mutex);
  advance();
  if (done()) return;
  for (const auto& hold : state.holds) hold->released |= hold->until_waited;
  advance();
  TORCH_CHECK(done(), "The host waits for a stream that the test holds:\n", pending());
}

void synchronize(StreamId stream) {
  wait_on_host([stream] { return state.streams[stream].empty(); });
}

// Memory.

// The host can neither read nor write the address of device memory. The device reaches the memory
// at a constant distance behind it. An address is never used twice, so use after free is found.
constexpr size_t kPage = 4096, kSpan = size_t{1} << 38;

char* behind(char* address) { return address + kSpan; }

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

bool is_in(const std::map<const char*, size_t>& blocks, const void* address, size_t bytes) {
  const Lock lock(state.mutex);
  const auto* first = static_cast<const char*>(address);
  const auto next = blocks.upper_bound(first);
  if (next == blocks.begin()) return false;
  const auto& [begin, size] = *std::prev(next);
  return first + bytes <= begin + size;
}

struct DeviceAllocator final : c10::Allocator {
  struct Owner {
    const char* address;
    StreamId stream;
  };

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, kDevice};
    const Lock lock(state.mutex);
    if (state.memory == nullptr) {
      constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
      void* mapped = mmap(nullptr, 2 * kSpan, PROT_NONE, flags, -1, 0);
      TORCH_CHECK(mapped != MAP_FAILED, "There are no addresses");
      state.memory = static_cast<char*>(mapped);
    }
    char* const address = state.memory;
    const size_t size = whole_pages(bytes);
    TORCH_CHECK(mprotect(behind(address), size, PROT_READ | PROT_WRITE) == 0, "No memory");
    std::memset(behind(address), 0xCD, size);
    state.memory += size + kPage;  // so that blocks do not touch
    state.blocks[address] = bytes;
    return {address, new Owner{address, current_stream}, free_in_order, kDevice};
  }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "Device memory is copied by operators");
  }

  // As a caching allocator does: in the order of the stream that was current in allocate().
  static void free_in_order(void* context) {
    const std::unique_ptr<Owner> owner(static_cast<Owner*>(context));
    submit(owner->stream, {"free", [address = owner->address] { state.blocks.erase(address); }});
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::kCPU};
    void* address = std::aligned_alloc(kPage, whole_pages(bytes));
    TORCH_CHECK(address != nullptr, "No memory");
    std::memset(address, 0xCD, bytes);
    const Lock lock(state.mutex);
    state.pinned[static_cast<char*>(address)] = bytes;
    return {address, address, release, c10::kCPU};
  }
  void copy_data(void* dst, const void* src, size_t bytes) const override {
    default_copy_data(dst, src, bytes);
  }
  static void release(void* address) {
    const Lock lock(state.mutex);
    state.pinned.erase(static_cast<char*>(address));
    std::free(address);
  }
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;
[[maybe_unused]] const bool has_allocator = (c10::SetAllocator(kType, &device_allocator), true);

// Streams and events for PyTorch.

c10::Stream to_torch(StreamId stream) { return c10::Stream(c10::Stream::UNSAFE, kDevice, stream); }

struct Event {
  const bool timed;
  std::shared_ptr<Recording> last;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return to_torch(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return to_torch(0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    const Lock lock(state.mutex);
    return to_torch(++state.last_stream);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return to_torch(std::exchange(current_stream, stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    const Lock lock(state.mutex);
    advance();
    return state.streams[stream.id()].empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream.id()); }
  void synchronizeDevice(const c10::DeviceIndex) const {  // newer than PyTorch 2.11
    wait_on_host([] { return pending().empty(); });
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag flag) const override {
    if (*event == nullptr) *event = new Event{flag == c10::EventFlag::BACKEND_DEFAULT, {}};
    auto recording = static_cast<Event*>(*event)->last = std::make_shared<Recording>();
    submit(stream.id(), {"record an event", [recording] { *recording = {true, Clock::now()}; }});
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    auto recording = static_cast<Event*>(event)->last;
    submit(stream.id(), {"wait for an event", [] {}, [recording] { return recording->done; }});
  }
  bool queryEvent(void* event) const override {
    const Lock lock(state.mutex);
    advance();
    return event == nullptr || static_cast<Event*>(event)->last->done;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    wait_on_host([last = static_cast<Event*>(event)->last] { return last->done; });
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const auto time_of = [](void* event) {
      const auto* of = static_cast<Event*>(event);
      TORCH_CHECK(of != nullptr && of->timed && of->last->done, "The event has no time");
      return of->last->time;
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
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* address) const override { return is_in(state.pinned, address, 1); }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
};

struct CudaHooks final : Hooks<at::CUDAHooksInterface> {
  bool hasCUDA() const override { return true; }
};

[[maybe_unused]] const bool has_hooks = [] {
  if (kType == c10::DeviceType::CUDA)
    at::CUDAHooksRegistry()->Register(
        "CUDAHooks", [](at::CUDAHooksArgs) { return std::make_unique<CudaHooks>(); });
  else
    at::RegisterPrivateUse1HooksInterface(new Hooks<at::PrivateUse1HooksInterface>);
  return true;
}();

// Operators.

// What queued work knows of a tensor. It does not keep device memory, as on other devices. It keeps
// host memory, as PyTorch's allocators of pinned memory do.
class View {
 public:
  explicit View(const at::Tensor& tensor)
      : address_(static_cast<char*>(tensor.data_ptr())),
        sizes_(tensor.sizes().vec()),
        strides_(tensor.strides().vec()),
        dtype_(tensor.scalar_type()),
        bytes_(at::detail::computeStorageNbytes(sizes_, strides_, tensor.itemsize())) {
    if (tensor.is_cpu()) host_ = tensor.storage();
  }

  // The memory as a tensor of the CPU.
  at::Tensor reach() const {
    char* address = address_;
    if (!host_ && bytes_ != 0) {
      TORCH_CHECK(is_in(state.blocks, address, bytes_), "it uses ", bytes_,
                  " bytes of the device that were freed: the stream that allocated them has not "
                  "waited for it");
      address = behind(address);
    }
    return at::from_blob(address, sizes_, strides_, at::TensorOptions().dtype(dtype_));
  }

 private:
  char* address_;
  std::vector<int64_t> sizes_, strides_;
  at::ScalarType dtype_;
  size_t bytes_;
  std::optional<c10::Storage> host_;
};

void launch(const char* what, std::function<void()> run) {
  submit(current_stream, {what, [run = std::move(run)] {
                            at::AutoDispatchBelowADInplaceOrView no_autograd;
                            run();
                          }});
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, &device_allocator, c10::DispatchKeySet(kKey),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator,
                                           c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype));
}

// Asynchronous where it is on other devices: on the device, and with pinned memory that is copied
// byte by byte.
at::Tensor copy_from(const at::Tensor& src, const at::Tensor& dst, bool non_blocking) {
  launch("copy", [from = View(src.expand(dst.sizes())), to = View(dst)] {
    to.reach().copy_(from.reach());
  });
  const at::Tensor& host = src.is_cpu() ? src : dst;
  const bool is_async = non_blocking && is_in(state.pinned, host.data_ptr(), 1) &&
                        host.is_contiguous() && src.dtype() == dst.dtype();
  if (host.is_cpu() && !is_async) synchronize(current_stream);
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& src, const at::Tensor& dst) {
  if (src.sizes() != dst.sizes()) {  // dst is an empty result
    dst.unsafeGetTensorImpl()->set_storage_keep_dtype(
        at::empty(src.sizes(), dst.options()).storage());
    dst.unsafeGetTensorImpl()->set_sizes_contiguous(src.sizes());
  }
  return copy_from(src, dst, false);
}

// PyTorch calls _copy_from() only for PrivateUse1.
at::Tensor& copy(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  copy_from(src, self, non_blocking);
  return self;
}

at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  launch("fill_", [to = View(self), value] { to.reach().fill_(value); });
  return self;
}

at::Tensor& zero(at::Tensor& self) { return fill(self, 0); }

at::Tensor& index_select_out(const at::Tensor& self, int64_t dim, const at::Tensor& ids,
                             at::Tensor& out) {
  launch("index_select", [from = View(self), dim, at = View(ids), to = View(out)] {
    to.reach().copy_(at::index_select(from.reach(), dim, at.reach()));
  });
  return out;
}

at::Tensor index_select(const at::Tensor& self, int64_t dim, const at::Tensor& ids) {
  std::vector<int64_t> sizes = self.sizes().vec();
  sizes[dim] = ids.numel();
  at::Tensor out = at::empty(sizes, self.options());
  return index_select_out(self, dim, ids, out);
}

at::Tensor& index_copy(at::Tensor& self, int64_t dim, const at::Tensor& ids,
                       const at::Tensor& source) {
  launch("index_copy_", [to = View(self), dim, at = View(ids), from = View(source)] {
    to.reach().index_copy_(dim, at.reach(), from.reach());
  });
  return self;
}

TORCH_LIBRARY_IMPL(aten, FAKE_TYPE, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view",
               static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef)>(at::native::view));
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  if (kType == c10::DeviceType::CUDA) library.impl("copy_", copy);
  library.impl("fill_.Scalar", fill);
  library.impl("zero_", zero);
  library.impl("index_select", index_select);
  library.impl("index_select.out", index_select_out);
  library.impl("index_copy_", index_copy);
}

// All others block: they copy their tensors to the host, compute there, and copy the results.
void compute_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, FAKE_TYPE, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
}

}  // namespace

// For fake_accelerator/__init__.py. A text is valid until the thread's next call.
extern "C" {

int64_t accelerator_hold(StreamId stream, bool until_waited) {
  const Lock lock(state.mutex);
  auto hold = std::make_shared<Hold>(until_waited);
  submit(stream, {"hold", [] {}, [hold] { return hold->released; }});
  state.holds.push_back(std::move(hold));
  return static_cast<int64_t>(state.holds.size()) - 1;
}

void accelerator_release(int64_t hold) {
  const Lock lock(state.mutex);
  state.holds[hold]->released = true;
}

const char* accelerator_pending() {
  static thread_local std::string text;
  const Lock lock(state.mutex);
  return (text = pending()).c_str();
}

// Ends all holds and all work.
void accelerator_finish() {
  const Lock lock(state.mutex);
  for (const auto& hold : state.holds) hold->released = true;
  advance();
}

const char* accelerator_take_error() {
  static thread_local std::string text;
  const Lock lock(state.mutex);
  advance();
  return (text = std::exchange(state.error, {})).c_str();
}

}  // extern "C"
