#include "device/cuda.h"

#include <algorithm>
#include <new>

#include "check.h"
#include "copy/address_map.h"
#include "copy/batch.h"
#include "copy/staged.h"
#include "copy/strided.h"
#include "cuda/context.h"
#include "cuda/stream.h"
#include "kernels/kernels.h"

namespace kvswap {
namespace {

cuda::StreamRef to_cuda(const StreamRef& stream) { return {stream.device, stream.handle}; }

// Gives copies to the driver: to the channel's stream, and the packing of staged ones to a stream
// of its own.
class CudaCopier : public Copier {
 public:
  CudaCopier(int device, cuda::Stream copies, bool to_host)
      : device_(device), copies_(copies), to_host_(to_host) {}
  ~CudaCopier() override {
    if (kernels_ != nullptr) cuda::driver().destroy_stream(kernels_);
  }

  void use_staging(uint64_t begin, uint64_t bytes) override;
  void add_relay(int device, uint64_t begin, uint64_t bytes) override {
    staging_->add_relay(device, begin, bytes);
  }
  void remove_relay(int device) noexcept override { staging_->remove_relay(device); }
  void use_exchange(std::shared_ptr<Exchange> exchange, uint64_t place_bytes) override {
    exchange->use_ring(device_, copies_, kernels_, place_bytes);
    exchange_ = std::move(exchange);
  }
  void start_after(const std::vector<Event>& events) override;
  Stream copy(const std::vector<PartCopy>& parts, Event start, bool has_pageable,
              CopyPosition& next, uint64_t& bytes) override;
  bool synchronize() noexcept override;
  bool has_relayed() const override { return staging_ != nullptr && staging_->has_relayed(); }
  bool relays_are_alive() const noexcept override {
    return staging_ == nullptr || staging_->relays_are_alive();
  }
  bool is_drained() const noexcept override;
  size_t fragments_per_entry() const override;
  size_t num_streams() const override {
    return kernels_ == nullptr ? 0 : 1 + 2 * staging_->relays().size();
  }
  size_t num_events() const override { return staging_ == nullptr ? 0 : staging_->num_events(); }
  std::vector<RelayedBytes> relayed_bytes() const override;

 private:
  uint64_t stage(const PartCopy& part, Event start, const BatchOptions& options, uint64_t begin,
                 uint64_t& bytes);
  void send(FragmentList& fragments, const BatchOptions& options);
  bool is_exchanging() const { return exchange_ != nullptr && exchange_->is_loading(); }
  void order_after_staging();

  const int device_;
  const cuda::Stream copies_;
  const bool to_host_;
  cuda::Stream kernels_ = nullptr;  // packs and unpacks
  std::unique_ptr<StagingBuffer> staging_;
  bool is_unpacking_ = false;  // kernels_ has work that copies_ is not ordered after
  std::shared_ptr<Exchange> exchange_;
};

void CudaCopier::use_staging(uint64_t begin, uint64_t bytes) {
  kernels_ = cuda::create_stream();
  const StagedStreams streams{{device_, copies_}, {device_, kernels_}};
  staging_ = std::make_unique<StagingBuffer>(streams, to_host_, begin, bytes);
}

// A store is packed while the one before it is on the link. Beside a GEMM the kernel waits for SMs
// meanwhile. Loads are unpacked after copies of the channel's stream anyway.
void CudaCopier::start_after(const std::vector<Event>& events) {
  if (staging_ == nullptr) return;
  staging_->begin_transfer();
  if (!to_host_) return;
  for (const Event event : events) {
    cuda::wait_event({device_, kernels_}, event);
  }
}

Stream CudaCopier::copy(const std::vector<PartCopy>& parts, Event start, bool has_pageable,
                        CopyPosition& next, uint64_t& bytes) {
  BatchOptions options;
  options.has_pageable = has_pageable;
  FragmentList fragments;
  bool ends_staged = false;
  for (; next.part < parts.size(); ++next.part) {
    const PartCopy& part = parts[next.part];
    if (part.table != nullptr && next.byte == 0) part.table->begin_copy(part);
    ends_staged = part.method == CopyMethod::kStaged && !to_host_;
    if (part.method == CopyMethod::kStaged) {
      send(fragments, options);
      if (bytes == 0) return nullptr;
      next.byte = stage(part, start, options, next.byte, bytes);
      if (next.byte != 0) return nullptr;
      continue;
    }
    // The unstaged tail of a load is copied while the load itself is unpacked; no other load is
    // unpacked then.
    if (!part.is_head_or_tail) order_after_staging();
    if (part.method == CopyMethod::kStrided) {
      copy_strided(part.block_copy(), runs_among(*part.runs, part.slabs), copies_);
      if (part.table != nullptr) part.table->end_copy(part, copies_);
    } else if (part.method == CopyMethod::kKernel) {
      part.table->copy_over_link(part, copies_);
    } else {
      add_fragments(fragments, part.block_copy(), part.slabs);
    }
  }
  send(fragments, options);
  if (ends_staged || is_exchanging()) return kernels_;
  order_after_staging();
  return copies_;
}

// Stages the part from byte `begin` on, and reduces `bytes`. Returns where the next piece begins, 0
// if there is none.
uint64_t CudaCopier::stage(const PartCopy& part, Event start, const BatchOptions& options,
                           uint64_t begin, uint64_t& bytes) {
  is_unpacking_ = !to_host_;
  const uint64_t end = is_exchanging()
                           ? exchange_->load(part, *part.table, begin, bytes, options)
                           : staging_->copy(part, *part.table, begin, bytes, start, options);
  bytes -= std::min(bytes, end - begin);
  return end < part.count * part.encoding->packed_bytes(part.slabs) ? end : 0;
}

void CudaCopier::send(FragmentList& fragments, const BatchOptions& options) {
  if (fragments.empty()) return;
  copy_batch(fragments, {device_, copies_}, options);
  fragments = FragmentList();
}

// What was staged is on the GPU only when it has been unpacked, and on the host only when the
// relays have copied their part of it.
void CudaCopier::order_after_staging() {
  if (to_host_ && staging_ != nullptr) staging_->order_after_relays();
  if (std::exchange(is_unpacking_, false))
    cuda::order_after({device_, kernels_}, {device_, copies_});
}

// The queue of a waiting stream takes about 1,020 copies, or 26,000 fragments of batch calls. Then
// the driver blocks the submitting thread (H200).
constexpr size_t kFragmentsPerEntry = 25;

size_t CudaCopier::fragments_per_entry() const {
  const cuda::Driver& driver = cuda::driver();
  return driver.copy_batch_async != nullptr ? kFragmentsPerEntry : 1;
}

bool CudaCopier::synchronize() noexcept {
  bool alive = staging_ == nullptr || staging_->relays().empty() || staging_->wait_for_relays();
  for (const cuda::Stream stream : {copies_, kernels_}) {
    if (!alive || stream == nullptr) continue;
    alive = cuda::driver().synchronize_stream(stream) == cuda::kSuccess;
  }
  if (staging_ != nullptr) staging_->forget();
  if (exchange_ != nullptr && alive) exchange_->abandon();
  return alive;
}

bool CudaCopier::is_drained() const noexcept {
  if (staging_ == nullptr) return true;
  const auto is_busy = [](cuda::Stream stream) {
    return cuda::driver().query_stream(stream) == cuda::kNotReady;
  };
  return !is_busy(copies_) && !is_busy(kernels_) && staging_->hops_are_drained();
}

std::vector<RelayedBytes> CudaCopier::relayed_bytes() const {
  std::vector<RelayedBytes> found;
  if (staging_ == nullptr) return found;
  for (const Relay& relay : staging_->relays()) found.push_back({relay.peer(), relay.bytes()});
  return found;
}

class CudaDevice : public Device, public PackKernels {
 public:
  using Device::Device;

  std::string name() const override { return "CUDA device " + std::to_string(index()); }
  bool is_synchronous() const override { return false; }

  void enter(ContextState& state) override {
    static_assert(sizeof(cuda::ContextGuard) <= sizeof(state.bytes));
    new (state.bytes) cuda::ContextGuard(index());
  }
  void leave(ContextState& state) noexcept override {
    std::launder(reinterpret_cast<cuda::ContextGuard*>(state.bytes))->~ContextGuard();
  }

  Stream create_stream() override { return cuda::create_stream(); }
  void destroy_stream(Stream stream) noexcept override { cuda::driver().destroy_stream(stream); }
  bool is_idle(Stream stream) override {
    return is_over(cuda::driver().query_stream(stream), "cuStreamQuery");
  }
  bool is_alive(Stream stream) noexcept override {
    const cuda::Result state = cuda::driver().query_stream(stream);
    return state == cuda::kSuccess || state == cuda::kNotReady;
  }
  StreamRef current_stream() const override {
    const cuda::StreamRef current = cuda::current_stream(index());
    return {current.device, current.handle};
  }
  bool is_capturing(const StreamRef& stream) override {
    return cuda::is_capturing(to_cuda(stream));
  }
  void wait_event(const StreamRef& stream, Event event) override {
    cuda::wait_event(to_cuda(stream), event);
  }

  Event create_event(bool timed) override {
    return cuda::create_event(timed ? cuda::kEventDefault : cuda::kEventDisableTiming);
  }
  void destroy_event(Event event) noexcept override { cuda::driver().destroy_event(event); }
  void record_event(Event event, Stream stream, const char* purpose) override {
    KVSWAP_DRIVER_CHECK(cuda::driver().record_event(event, stream), "cuEventRecord", purpose);
  }
  void wait_event(Stream stream, Event event, const char* purpose) override {
    KVSWAP_DRIVER_CHECK(cuda::driver().wait_event(stream, event, 0), "cuStreamWaitEvent", purpose);
  }
  bool has_happened(Event event) override {
    return is_over(cuda::driver().query_event(event), "cuEventQuery");
  }
  double seconds_between(Event start, Event end) override {
    float ms = 0;
    KVSWAP_DRIVER_CHECK(cuda::driver().elapsed_time(&ms, start, end), "cuEventElapsedTime");
    return ms / 1e3;
  }

  Allocations find_allocations(const std::vector<uint64_t>& cache,
                               const std::vector<uint64_t>& host) override;
  void* allocate_host(uint64_t bytes) override {
    const cuda::ContextGuard context(index());
    void* memory = nullptr;
    KVSWAP_DRIVER_CHECK(cuda::driver().allocate_host(&memory, bytes, cuda::kRegisterPortable),
                        "cuMemHostAlloc", " of ", bytes, " bytes");
    return memory;
  }
  void free_host(void* address) override {
    const cuda::ContextGuard context(index());
    KVSWAP_DRIVER_CHECK(cuda::driver().free_host(address), "cuMemFreeHost");
  }

  const std::vector<CopyMethod>& copy_methods() const override {
    static const std::vector<CopyMethod> methods{CopyMethod::kStrided, CopyMethod::kBatch,
                                                 CopyMethod::kStaged, CopyMethod::kKernel};
    return methods;
  }
  std::unique_ptr<Copier> make_copier(Stream copies, bool to_host) override {
    return std::make_unique<CudaCopier>(index(), copies, to_host);
  }
  PackKernels* pack_kernels() override { return this; }

  void load_kernels() override { cuda::kernels(index()); }
  uint64_t allocate_staging(int device, uint64_t bytes) override {
    const cuda::ContextGuard context(device);
    cuda::Address address = 0;
    KVSWAP_DRIVER_CHECK(cuda::driver().allocate(&address, bytes), "cuMemAlloc", " of ", bytes,
                        " bytes for staging (staging_bytes)");
    return address;
  }
  void free_staging(int device, uint64_t address) noexcept override {
    try {
      const cuda::ContextGuard context(device);
      cuda::driver().free(address);
    } catch (const std::exception&) {  // a lost relay, and its memory with it
    }
  }

 private:
  static bool is_over(cuda::Result state, const char* call) {
    if (state == cuda::kNotReady) return false;
    KVSWAP_DRIVER_CHECK(state, call);
    return true;
  }
};

Allocations CudaDevice::find_allocations(const std::vector<uint64_t>& cache,
                                         const std::vector<uint64_t>& host) {
  Allocations found;
  AddressMap addresses;
  for (const uint64_t address : cache) {
    const Memory memory = addresses.find(address);
    KVSWAP_CHECK(memory.device == index(), "the cache at ", addresses.describe(address),
                 " is not memory of device ", index());
    found.cache.push_back(memory.begin);
  }
  for (const uint64_t address : host) {
    const Memory memory = addresses.find(address);
    found.host.push_back(memory.begin);
    found.host_is_pageable |= memory.kind == MemoryKind::kPageable;
  }
  return found;
}

}  // namespace

std::unique_ptr<Device> make_cuda_device(int index) { return std::make_unique<CudaDevice>(index); }

void register_host(int device, void* address, uint64_t bytes) {
  const cuda::ContextGuard context(device);
  int is_same = 0;
  KVSWAP_DRIVER_CHECK(
      cuda::driver().get_device_attribute(&is_same, cuda::kHasRegisteredAtSameAddress, device),
      "cuDeviceGetAttribute");
  if (is_same == 0) {
    fail<NotImplementedError>("CUDA device ", device,
                              " uses other addresses for registered host memory than the "
                              "process does, as under WSL2");
  }
  const cuda::Result result =
      cuda::driver().register_host(address, bytes, cuda::kRegisterPortable | cuda::kRegisterMapped);
  if (result == cuda::kNotSupported) {
    fail<NotImplementedError>("cuMemHostRegister: ", cuda::describe(result),
                              ", as in confidential computing");
  }
  KVSWAP_DRIVER_CHECK(result, "cuMemHostRegister");
}

void unregister_host(int device, void* address) {
  const cuda::ContextGuard context(device);
  KVSWAP_DRIVER_CHECK(cuda::driver().unregister_host(address), "cuMemHostUnregister");
}

uint64_t pinned_until(int device, uint64_t address) {
  const cuda::ContextGuard context(device);
  const Memory memory = AddressMap().find(address);
  return memory.kind == MemoryKind::kPinned ? memory.end : 0;
}

}  // namespace kvswap
