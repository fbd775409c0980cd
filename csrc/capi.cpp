#include "capi.h"

#include <algorithm>
#include <functional>
#include <new>
#include <optional>
#include <string>
#include <tuple>

#include "check.h"
#include "cuda/driver.h"
#include "device/device.h"
#include "device/queued.h"
#include "encoding/codec.h"
#include "environment.h"
#include "host_memory.h"
#include "offload/handler.h"
#include "offload/request.h"
#include "prefix/manager.h"

namespace {

using kvswap::Handler;
using kvswap::Job;
using kvswap::JobRef;
using kvswap::prefix::BlockManager;
using kvswap::prefix::Keys;

// Errors. No exception may leave a C function: the calling thread's last one is kept for Python.

constexpr const char* kOutOfMemory = "out of host memory";

thread_local std::string error_text;
thread_local const char* shown_error = "";
thread_local const char* error_type = "RuntimeError";

void remember(const char* type, const char* message) noexcept {
  try {
    error_text = message;
    shown_error = error_text.c_str();
    error_type = type;
  } catch (const std::bad_alloc&) {
    shown_error = kOutOfMemory;
    error_type = "MemoryError";
  }
}

// Remembers the exception that is being handled. Cannot fail itself.
void remember_error() noexcept {
  try {
    throw;
  } catch (const kvswap::IndexError& error) {
    remember("IndexError", error.what());
  } catch (const kvswap::ValueError& error) {
    remember("ValueError", error.what());
  } catch (const kvswap::DeviceLostError& error) {
    remember("DeviceLostError", error.what());
  } catch (const std::bad_alloc&) {
    remember("MemoryError", kOutOfMemory);
  } catch (const std::exception& error) {
    remember("RuntimeError", error.what());
  }
}

// Runs the body of a C function, which no exception may leave.
template <typename Body>
bool succeeds(const Body& body) {
  try {
    body();
    return true;
  } catch (...) {
    remember_error();
    return false;
  }
}

}  // namespace

const char* kvswap_last_error() { return shown_error; }
const char* kvswap_last_error_type() { return error_type; }

// The driver, and host memory.

const char* kvswap_driver_name() {
  const kvswap::cuda::Driver* driver = kvswap::cuda::find_driver();
  return driver != nullptr && driver->is_hip ? "HIP" : "CUDA";
}

int kvswap_driver_version() {
  int version = 0;
  const kvswap::cuda::Driver* driver = kvswap::cuda::find_driver();
  if (driver == nullptr || driver->get_version(&version) != kvswap::cuda::kSuccess) return 0;
  return version;
}

const char* kvswap_driver_error() { return kvswap::cuda::driver_error().c_str(); }

bool kvswap_driver_has_batch() {
  const kvswap::cuda::Driver* driver = kvswap::cuda::find_driver();
  return driver != nullptr && driver->copy_batch_async != nullptr;
}

bool kvswap_driver_has_stream_words() {
  const kvswap::cuda::Driver* driver = kvswap::cuda::find_driver();
  return driver != nullptr && driver->wait_value != nullptr && driver->write_value != nullptr;
}

int kvswap_batch_limit() {
  int limit = -1;
  succeeds([&] {
    const kvswap::cuda::Driver* driver = kvswap::cuda::find_driver();
    const size_t max_batch = driver == nullptr ? ~size_t{0} : driver->max_batch;
    const size_t wanted = kvswap::batch_is_on() ? kvswap::batch_limit() : 0;
    limit = static_cast<int>(std::min(wanted, max_batch));
  });
  return limit;
}

int kvswap_kernel_version() {
#ifdef KVSWAP_WITH_KERNELS
  return KVSWAP_WITH_KERNELS;
#else
  return 0;
#endif
}

namespace {

// -1 for host memory.
kvswap::Device& cuda_or_host(int index) {
  return kvswap::find_device(index < 0 ? kvswap::DeviceKind::kHost : kvswap::DeviceKind::kCuda,
                             index);
}

}  // namespace

bool kvswap_host_register(int device, void* address, uint64_t bytes) {
  return succeeds([&] { cuda_or_host(device).register_host(address, bytes); });
}

bool kvswap_host_unregister(int device, void* address) {
  return succeeds([&] { cuda_or_host(device).unregister_host(address); });
}

int kvswap_host_is_pinned(int device, const void* address) {
  int pinned = -1;
  succeeds([&] { pinned = cuda_or_host(device).is_pinned(address); });
  return pinned;
}

bool kvswap_device_pci_address(int device, int32_t* numbers) {
  return succeeds([&] {
    for (const int attribute :
         {kvswap::cuda::kPciDomain, kvswap::cuda::kPciBus, kvswap::cuda::kPciDevice}) {
      KVSWAP_DRIVER_CHECK(kvswap::cuda::driver().get_device_attribute(numbers++, attribute, device),
                          "cuDeviceGetAttribute", " of CUDA device ", device);
    }
  });
}

void* kvswap_host_map(int fd, uint64_t bytes, uint64_t alignment, bool transparent) {
  void* address = nullptr;
  succeeds([&] { address = kvswap::map_host(fd, bytes, alignment, transparent); });
  return address;
}

void kvswap_host_unmap(void* address, uint64_t bytes) { kvswap::unmap_host(address, bytes); }

bool kvswap_host_bind(void* address, uint64_t bytes, int node) {
  return kvswap::bind_host(address, bytes, node);
}

bool kvswap_host_touch(void* address, uint64_t bytes, int threads, bool collapse,
                       const int32_t* cpus, int cpu_count) {
  return succeeds(
      [&] { kvswap::touch_host(address, bytes, {threads, collapse, cpus, cpu_count}); });
}

void kvswap_ready_range_publish(kvswap_ready_range* range, int64_t end_page, int64_t chunk_blocks) {
  __atomic_store_n(&range->chunk_blocks, chunk_blocks, __ATOMIC_RELAXED);
  __atomic_store_n(&range->end_page, end_page, __ATOMIC_RELEASE);
}

bool kvswap_ready_range_check(const kvswap_ready_range* range, int64_t page, int64_t num_pages) {
  return succeeds([&] { kvswap::check_page("page", page, num_pages, *range); });
}

// Lossless encoding.

namespace {

std::vector<uint64_t> read_numbers(const int64_t* numbers, int64_t count) {
  return {numbers, numbers + count};
}

// A block in host memory, and what its slot has.
struct HostBlock {
  kvswap::SlotFormat format;
  std::vector<kvswap::SlotTile> tiles;

  HostBlock(const int64_t* bases, const int64_t* sizes, int64_t num_slabs, int width_eighths)
      : format(read_numbers(sizes, num_slabs), width_eighths),
        tiles(kvswap::tiles_in(slabs(bases, num_slabs), format.tiles())) {}
  static kvswap::Slabs slabs(const int64_t* bases, int64_t num_slabs) {
    kvswap::Slabs slabs;
    slabs.bases = read_numbers(bases, num_slabs);
    slabs.strides.resize(slabs.bases.size());
    return slabs;
  }
  kvswap::SlotTiles slot_tiles() const {
    return {tiles.data(), format.tile_count(), format.max_escapes()};
  }
};

}  // namespace

bool kvswap_encoding_format(const int64_t* sizes, int64_t num_slabs, int width_eighths,
                            kvswap_slot_format* format) {
  return succeeds([&] {
    const kvswap::SlotFormat made(read_numbers(sizes, num_slabs), width_eighths);
    *format = {made.slot_bytes(), made.metadata_bytes(), made.tile_count(), made.max_escapes()};
  });
}

int kvswap_encode_block(const int64_t* bases, const int64_t* sizes, int64_t num_slabs,
                        int width_eighths, void* slot) {
  int state = -1;
  succeeds([&] {
    const HostBlock block(bases, sizes, num_slabs, width_eighths);
    auto* into = static_cast<uint8_t*>(slot);
    state = static_cast<int>(kvswap::encode_slot(block.slot_tiles(), 0, into));
  });
  return state;
}

int kvswap_decode_block(const int64_t* bases, const int64_t* sizes, int64_t num_slabs,
                        int width_eighths, const void* slot, int64_t first_slab, int64_t end_slab) {
  int state = -1;
  succeeds([&] {
    const HostBlock block(bases, sizes, num_slabs, width_eighths);
    const auto range =
        block.format.tiles_of({static_cast<size_t>(first_slab), static_cast<size_t>(end_slab)});
    const auto* from = static_cast<const uint8_t*>(slot);
    state = static_cast<int>(kvswap::decode_slot(block.slot_tiles(), range, from, 0, 0));
  });
  return state;
}

int64_t kvswap_count_escapes(const int64_t* bases, const int64_t* sizes, int64_t num_slabs) {
  int64_t escapes = -1;
  succeeds([&] {
    const auto tiles = kvswap::cut_into_tiles(read_numbers(sizes, num_slabs), 0);
    const auto located = kvswap::tiles_in(HostBlock::slabs(bases, num_slabs), tiles);
    escapes = static_cast<int64_t>(kvswap::count_escapes(located, 0));
  });
  return escapes;
}

// Handlers, jobs and gates.

namespace {

Handler& handler_at(void* handler) { return *static_cast<Handler*>(handler); }

// Runs the body in the context of the handler's device. A lost device may refuse its context; the
// body runs all the same. Functions that only read jobs need no context: the scheduler takes it if
// something runs on the device.
template <typename Body>
bool succeeds_in(void* handler, const Body& body) {
  return succeeds([&] {
    std::optional<kvswap::ContextGuard> context;
    Handler& of = handler_at(handler);
    try {
      context.emplace(of.device());
    } catch (const std::exception& error) {
      of.on_context_error(kvswap::Reason(error));
    }
    body(of);
  });
}

std::vector<kvswap::Group> read_groups(const kvswap_group* groups, int count,
                                       kvswap::Device& device) {
  std::vector<kvswap::Group> read;
  for (int i = 0; i < count; ++i) read.push_back(kvswap::read_group(groups[i], device));
  return read;
}

kvswap_result to_c(const Job& job) {
  kvswap_result result{};
  result.id = job.id;
  result.token = job.token;
  result.nbytes = job.nbytes;
  result.link_bytes = job.link_bytes;
  result.submit_seconds = job.submit_seconds;
  result.queue_seconds = job.queue_seconds;
  result.copy_seconds = job.copy_seconds;
  result.channel = job.channel;
  result.layer_groups = job.layer_groups;
  result.copy_method = static_cast<int32_t>(job.copy_method);
  result.state = static_cast<int32_t>(job.state);
  result.is_cancelling = job.work != nullptr && job.work->was_cancelled;
  result.error_kind = static_cast<int32_t>(job.error.kind());
  result.error = job.error.c_str();
  if (job.rejected != nullptr) {
    result.rejected_count = static_cast<int32_t>(job.rejected->size());
    result.rejected = job.rejected->data();
  }
  result.job = const_cast<Job*>(&job);
  return result;
}

// A reference for Python.
void* new_ref(const JobRef& job) {
  job->references.fetch_add(1);
  return job.get();
}

// Writes results one after another, each with a reference to its job.
class Results {
 public:
  explicit Results(kvswap_result* results) : results_(results) {}

  void operator()(const JobRef& job) {
    results_[count] = to_c(*job);
    results_[count++].job = new_ref(job);
  }

  int count = 0;

 private:
  kvswap_result* results_;
};

// stream_device: -1 for the stream that is current on `device`.
kvswap::StreamRef resolve(const kvswap::Device& device, void* stream, int stream_device) {
  if (stream_device < 0) return device.current_stream();
  return {stream_device, stream};
}

}  // namespace

void* kvswap_handler_create(const kvswap_group* groups, int count, int64_t layers, int device_kind,
                            int device, bool submit_thread,
                            const kvswap_copy_method_options* options) {
  void* handler = nullptr;
  succeeds([&] {
    kvswap::Device& on = kvswap::find_device(static_cast<kvswap::DeviceKind>(device_kind), device);
    const kvswap::ContextGuard context(on);
    handler = new Handler(read_groups(groups, count, on), layers, on, submit_thread, *options);
  });
  return handler;
}

const char* kvswap_handler_slower_copies(void* handler) {
  return handler_at(handler).slower_copies().c_str();
}

bool kvswap_handler_check_open(void* handler) {
  return succeeds([&] { handler_at(handler).check_open(); });
}

void kvswap_handler_destroy(void* handler) { delete static_cast<Handler*>(handler); }

bool kvswap_handler_rebind(void* handler, const kvswap_group* groups, int count, bool* done) {
  return succeeds_in(handler, [&](Handler& of) {
    of.rebind(read_groups(groups, count, of.device()));
    *done = true;
  });
}

bool kvswap_handler_submit(void* handler, kvswap_request* request) {
  if (!succeeds([&] { handler_at(handler).check_process(); })) return false;
  return succeeds_in(handler, [&](Handler& of) {
    const JobRef submitted = of.submit(*request);
    request->id = submitted->id;
    request->nbytes = static_cast<int64_t>(submitted->nbytes);
    request->job = new_ref(submitted);
  });
}

kvswap_ended* kvswap_handler_poll(void* handler) {
  kvswap_ended* ended = nullptr;
  succeeds([&] { ended = &handler_at(handler).report(to_c); });
  return ended;
}

int kvswap_handler_wait_for_ended(void* handler, double seconds) {
  int ended = -1;
  succeeds([&] { ended = handler_at(handler).wait_for_ended(seconds); });
  return ended;
}

int kvswap_handler_synchronize(void* handler, void* const* jobs, int count, double seconds,
                               kvswap_unended* unended) {
  int ended = -1;
  succeeds([&] {
    std::vector<Job*> list;
    for (int i = 0; i < count; ++i) list.push_back(static_cast<Job*>(jobs[i]));
    ended = handler_at(handler).synchronize(list, jobs == nullptr, seconds, *unended);
  });
  return ended;
}

int kvswap_handler_unreported_failures(void* handler, kvswap_result* results, int capacity) {
  Results found(results);
  const bool succeeded =
      succeeds([&] { handler_at(handler).read_unreported_failures(capacity, std::ref(found)); });
  return succeeded ? found.count : -1;
}

int kvswap_handler_close(void* handler, double seconds) {
  int closed = -1;
  succeeds_in(handler, [&](Handler& of) { closed = of.close(seconds); });
  return closed;
}

void kvswap_job_release(void* job) {
  if (job != nullptr) JobRef::release(static_cast<Job*>(job));
}

bool kvswap_job_result(void* handler, void* job, kvswap_result* result) {
  return succeeds([&] { *result = handler_at(handler).snapshot(static_cast<Job*>(job), to_c); });
}

int kvswap_job_query(void* handler, void* job) {
  int done = -1;
  succeeds([&] { done = handler_at(handler).has_ended(static_cast<Job*>(job)); });
  return done;
}

bool kvswap_job_wait(void* handler, void* job, int layer_group, void* stream, int stream_device) {
  return succeeds_in(handler, [&](Handler& of) {
    of.wait(static_cast<Job*>(job), layer_group, resolve(of.device(), stream, stream_device));
  });
}

int kvswap_job_cancel(void* handler, void* job) {
  int cancelled = -1;
  succeeds_in(handler, [&](Handler& of) { cancelled = of.cancel(static_cast<Job*>(job)); });
  return cancelled;
}

void* kvswap_gate_create(void* handler, int layer_groups) {
  void* gate = nullptr;
  succeeds_in(handler, [&](Handler& of) { gate = of.make_gate(layer_groups); });
  return gate;
}

void kvswap_gate_release(void* gate) { kvswap::Gate::release(static_cast<kvswap::Gate*>(gate)); }

bool kvswap_gate_wait(void* gate, int layer_group, void* stream, int stream_device) {
  const auto& of = *static_cast<kvswap::Gate*>(gate);
  return succeeds([&] { of.wait(layer_group, resolve(of.device, stream, stream_device)); });
}

bool kvswap_handler_metrics(void* handler, int channel, kvswap_metrics* metrics) {
  return succeeds([&] { *metrics = handler_at(handler).metrics(channel); });
}

// Queued devices.

namespace {

kvswap::QueuedDevice& queue_at(void* queue) { return *static_cast<kvswap::QueuedDevice*>(queue); }

}  // namespace

void* kvswap_queue_create(int index, const char* name, bool has_batch) {
  void* queue = nullptr;
  succeeds([&] { queue = &kvswap::make_queued_device(index, name, has_batch); });
  return queue;
}

int kvswap_queue_wait(void* queue, double seconds) { return queue_at(queue).wait(seconds); }

void kvswap_queue_wake(void* queue) { queue_at(queue).wake(); }

bool kvswap_queue_is_empty(void* queue) { return queue_at(queue).is_empty(); }

bool kvswap_queue_first(void* queue, kvswap_command* command) {
  return queue_at(queue).read_first(*command);
}

void kvswap_queue_done(void* queue) { queue_at(queue).done(); }

void kvswap_queue_happened(void* queue, uint64_t event, uint64_t record, double seconds,
                           const char* error) {
  queue_at(queue).on_happened(event, record, seconds, error);
}

void kvswap_queue_lose(void* queue, const char* error) { queue_at(queue).lose(error); }

void kvswap_queue_stop(void* queue) { queue_at(queue).stop(); }

void* kvswap_queue_make_event(void* queue, uint64_t* number) {
  void* event = nullptr;
  succeeds([&] { event = queue_at(queue).make_recorded_event(*number); });
  return event;
}

void kvswap_queue_destroy_event(void* queue, void* event) { queue_at(queue).destroy_event(event); }

// Block managers.

namespace {

static_assert(sizeof(kvswap_blocks_event) == sizeof(kvswap::prefix::BlockEvent));
static_assert(KVSWAP_DIGEST_BYTES == kvswap::prefix::kDigestBytes);
static_assert(KVSWAP_BLOCKS_FEW_KEYS == BlockManager::kFewKeys);

BlockManager& manager_at(void* blocks) { return *static_cast<BlockManager*>(blocks); }

Keys read_keys(const void* keys, const int64_t* counts) {
  return {static_cast<const uint8_t*>(keys), counts};
}

// Returns the call's answer, KVSWAP_BLOCKS_BUSY if it must be made again without the GIL, or -1.
template <typename Call>
int64_t answer(const Call& call) {
  int64_t value = -1;
  succeeds([&] {
    try {
      value = static_cast<int64_t>(call());
    } catch (const kvswap::prefix::Busy&) {
      value = KVSWAP_BLOCKS_BUSY;
    }
  });
  return value;
}

std::vector<kvswap::prefix::GroupOptions> read_groups(const kvswap_blocks_group* groups,
                                                      int count) {
  std::vector<kvswap::prefix::GroupOptions> read;
  for (int i = 0; i < count; ++i) {
    const auto [num_pages, ratio, window] = groups[i];
    read.push_back({size_t(num_pages), size_t(ratio), size_t(window)});
  }
  return read;
}

}  // namespace

void* kvswap_blocks_create(const kvswap_blocks_group* groups, int count,
                           const kvswap_blocks_options* options) {
  void* made = nullptr;
  succeeds([&] {
    made = new BlockManager(read_groups(groups, count),
                            {static_cast<kvswap::prefix::EvictionPolicyKind>(options->policy),
                             static_cast<uint32_t>(options->store_threshold),
                             static_cast<size_t>(options->lookup_capacity), options->events});
  });
  return made;
}

void kvswap_blocks_destroy(void* blocks) { delete &manager_at(blocks); }

bool kvswap_blocks_grow(void* blocks, const int64_t* ready_pages) {
  return succeeds([&] { manager_at(blocks).grow(ready_pages); });
}

int64_t kvswap_blocks_lookup(void* blocks, const void* keys, const int64_t* counts, bool again,
                             kvswap_blocks_lookup_result* result, bool wait) {
  return answer([&] {
    const auto [found, ready, pending] =
        manager_at(blocks).lookup(read_keys(keys, counts), again, wait);
    *result = {found, ready, pending};
    return 1;
  });
}

int64_t kvswap_blocks_prepare_load(void* blocks, const void* keys, const int64_t* counts,
                                   int64_t* pages, bool wait) {
  return answer(
      [&] { return manager_at(blocks).prepare_load(read_keys(keys, counts), pages, wait); });
}

int64_t kvswap_blocks_prepare_store(void* blocks, const void* keys, const int64_t* counts,
                                    double now, bool keep, int64_t* key_indices, int64_t* pages,
                                    int64_t* new_counts, int64_t* reservation, int64_t* lease,
                                    bool wait) {
  return answer([&] {
    const auto stored = manager_at(blocks).prepare_store(read_keys(keys, counts), now, keep,
                                                         key_indices, pages, new_counts, wait);
    if (stored) std::tie(*reservation, *lease) = std::pair(stored->reservation, stored->lease);
    return stored.has_value();
  });
}

int64_t kvswap_blocks_end(void* blocks, int64_t reservation, bool succeeded,
                          const int64_t* rejected, int64_t num_rejected, bool wait) {
  return answer([&] {
    manager_at(blocks).end(reservation, succeeded, {rejected, rejected + num_rejected}, wait);
    return 1;
  });
}

int64_t kvswap_blocks_touch(void* blocks, const void* keys, const int64_t* counts, bool wait) {
  return answer([&] {
    manager_at(blocks).touch(read_keys(keys, counts), wait);
    return 1;
  });
}

int64_t kvswap_blocks_order(void* blocks, const void* keys, const int64_t* counts, bool renew,
                            bool wait) {
  return answer([&] {
    manager_at(blocks).order(read_keys(keys, counts), renew, wait);
    return 1;
  });
}

int64_t kvswap_blocks_lease(void* blocks, const void* keys, const int64_t* counts, double now,
                            double seconds, bool wait) {
  return answer(
      [&] { return manager_at(blocks).lease(read_keys(keys, counts), now, seconds, wait); });
}

int64_t kvswap_blocks_release(void* blocks, int64_t lease, bool wait) {
  return answer([&] { return manager_at(blocks).release(lease, wait); });
}

bool kvswap_blocks_reset(void* blocks) {
  return succeeds([&] { manager_at(blocks).reset(); });
}

int64_t kvswap_blocks_take_events(void* blocks, kvswap_blocks_event* events, int64_t capacity) {
  int64_t taken = -1;
  succeeds([&] {
    auto* into = reinterpret_cast<kvswap::prefix::BlockEvent*>(events);
    taken = static_cast<int64_t>(manager_at(blocks).take_events(into, size_t(capacity)));
  });
  return taken;
}

bool kvswap_blocks_stats_of(void* blocks, int group, double now, kvswap_blocks_stats* stats) {
  return succeeds([&] {
    manager_at(blocks).stats(size_t(group), now, [&](const auto& of, const auto& pages) {
      *stats = {of.asked,           of.hits,
                of.pending,         of.stored,
                of.loaded,          pages.num_evicted(),
                of.skipped,         of.refused,
                of.failed,          pages.num_ready_pages(),
                pages.num_free(),   pages.num_idle(),
                pages.num_filling()};
    });
  });
}

int kvswap_abi_version() { return KVSWAP_ABI_VERSION; }
