#include "cuda/context.h"

#include <map>
#include <mutex>
#include <utility>

namespace kvswap::cuda {
// Retained once and never released: the process uses the primary context until it ends.
Context primary_context(int device) {
  static std::mutex mutex;
  // Never destroyed: threads may still copy while the process exits.
  static auto& contexts = *new std::map<int, Context>;
  const std::lock_guard<std::mutex> lock(mutex);
  auto [entry, is_new] = contexts.try_emplace(device, nullptr);
  if (is_new) {
    const Result result = driver().retain_primary_context(&entry->second, device);
    if (result != kSuccess) contexts.erase(entry);
    KVSWAP_DRIVER_CHECK(result, "cuDevicePrimaryCtxRetain", " for CUDA device ", device);
  }
  return entry->second;
}

namespace {

constexpr int kNoDevice = -1;
thread_local int guarded_device = kNoDevice;  // of the innermost guard of the thread

}  // namespace

ContextGuard::ContextGuard(int device) : outer_(guarded_device) {
  if (device == outer_) return;
  KVSWAP_DRIVER_CHECK(driver().push_context(primary_context(device)), "cuCtxPushCurrent",
                      " for CUDA device ", device);
  driver().exchange_capture_mode(&capture_mode_);  // fails for no value of ours
  guarded_device = device;
}

ContextGuard::~ContextGuard() {
  if (guarded_device == outer_) return;
  guarded_device = outer_;
  // A destructor must not throw; the pop fails only when the driver is gone, and with it the
  // context that it would restore.
  Context context;
  driver().exchange_capture_mode(&capture_mode_);
  driver().pop_context(&context);
}

void enable_peer_access(int device, int peer) {
  for (const auto& [from, to] : {std::pair(device, peer), {peer, device}}) {
    int can = 0;
    KVSWAP_DRIVER_CHECK(driver().can_access_peer(&can, from, to), "cuDeviceCanAccessPeer",
                        " of CUDA devices ", from, " and ", to);
    KVSWAP_CHECK(can != 0, "CUDA device ", from, " cannot access the memory of CUDA device ", to);
    const Context accessed = primary_context(to);
    const ContextGuard context(from);
    const Result result = driver().enable_peer_access(accessed, 0);
    if (result == kPeerAccessAlreadyEnabled) continue;
    KVSWAP_DRIVER_CHECK(result, "cuCtxEnablePeerAccess", " of CUDA device ", from, " to ", to);
  }
}

bool is_capturing(const StreamRef& stream) {
  const ContextGuard context(stream.device);
  int status = 0;
  KVSWAP_DRIVER_CHECK(driver().is_capturing(stream.handle, &status), "cuStreamIsCapturing");
  return status != 0;
}

void record_event(Event event, const StreamRef& stream) {
  const ContextGuard context(stream.device);
  KVSWAP_DRIVER_CHECK(driver().record_event(event, stream.handle), "cuEventRecord");
}

void wait_event(const StreamRef& stream, Event event) {
  const ContextGuard context(stream.device);
  KVSWAP_DRIVER_CHECK(driver().wait_event(stream.handle, event, 0), "cuStreamWaitEvent");
}

namespace {

// An event of one record. The driver keeps a destroyed event until the work that uses it has ended.
class PassingEvent {
 public:
  explicit PassingEvent(const StreamRef& stream) {
    const ContextGuard context(stream.device);
    event_ = create_event(kEventDisableTiming);
    const Result result = driver().record_event(event_, stream.handle);
    if (result != kSuccess) driver().destroy_event(event_);
    KVSWAP_DRIVER_CHECK(result, "cuEventRecord");
  }
  ~PassingEvent() { driver().destroy_event(event_); }  // fails where the device is lost
  PassingEvent(const PassingEvent&) = delete;
  PassingEvent& operator=(const PassingEvent&) = delete;

  Event get() const { return event_; }

 private:
  Event event_ = nullptr;
};

}  // namespace

void order_after(const StreamRef& earlier, const StreamRef& later) {
  const PassingEvent end(earlier);
  wait_event(later, end.get());
}

Stream create_stream() {
  // Kernels that pack run for microseconds, and would wait for an endless series of short
  // kernels beside them. The driver takes the nearest priority that it has; copies have none.
  constexpr int kMaxUrgent = -100;
  Stream stream = nullptr;
  KVSWAP_DRIVER_CHECK(driver().create_stream(&stream, kStreamNonBlocking, kMaxUrgent),
                      "cuStreamCreateWithPriority");
  return stream;
}

Event create_event(unsigned flags) {
  Event event = nullptr;
  KVSWAP_DRIVER_CHECK(driver().create_event(&event, flags), "cuEventCreate");
  return event;
}

Address upload(const void* bytes, size_t count, Stream stream, const char* what) {
  Address address = 0;
  KVSWAP_DRIVER_CHECK(driver().allocate(&address, count), "cuMemAlloc", " of ", count, " bytes");
  Result result = driver().copy_async(address, reinterpret_cast<Address>(bytes), count, stream);
  if (result == kSuccess) result = driver().synchronize_stream(stream);
  if (result == kSuccess) return address;
  driver().free(address);
  KVSWAP_DRIVER_CHECK(result, "cuMemcpyAsync", " of ", what);
  return 0;  // not reached
}

StreamRef side_stream(int device) {
  static std::mutex mutex;
  static auto& streams = *new std::map<int, Stream>;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto known = streams.find(device);
  if (known != streams.end()) return {device, known->second};
  const ContextGuard context(device);
  const Stream stream = create_stream();
  streams.emplace(device, stream);
  return {device, stream};
}

}  // namespace kvswap::cuda
