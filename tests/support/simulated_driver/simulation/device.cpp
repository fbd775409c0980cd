#include "device.h"

#include <algorithm>
#include <atomic>

namespace simulated {
namespace {

constexpr uint64_t kEpoch = 1000000, kFirstStream = 100, kFirstEvent = 500000;
constexpr uint64_t kLegacy = 1, kPerThread = 2;  // handles of default streams; 0 is legacy, too
// A key of a default stream: its device and, if it is that of a thread, the thread's number. Device
// 0's legacy stream has 0; handles are smaller than the others.
constexpr int kDeviceShift = 56, kThreadShift = 40;

uint64_t number_of_thread() {
  static std::atomic<uint64_t> last{0};
  static thread_local const uint64_t number = ++last;
  return number;
}

}  // namespace

Device& device() {
  static auto& instance = *new Device;  // never destroyed: threads may still call at exit
  return instance;
}

uint64_t Device::create_stream() {
  const uint64_t handle = epoch_ * kEpoch + kFirstStream + ++streams_made_;
  streams_[handle] = std::make_shared<Stream>();
  streams_[handle]->device = current_context();
  streams_[handle]->created = true;
  streams_[handle]->is_callers = is_test;
  streams_[handle]->capturing = capturing_;
  return handle;
}

uint64_t Device::create_event(bool timed) {
  const uint64_t handle = epoch_ * kEpoch + kFirstEvent + ++events_made_;
  events_[handle] = std::make_shared<Event>();
  events_[handle]->number = static_cast<int>(events_made_);
  events_[handle]->device = current_context();
  events_[handle]->timed = timed;
  return handle;
}

uint64_t Device::key(uint64_t handle) const {
  if (handle > kPerThread) return handle;
  const uint64_t thread = handle == kPerThread ? number_of_thread() : 0;
  return uint64_t(current_context()) << kDeviceShift | thread << kThreadShift;
}

std::string Device::name(const void* handle) const {
  const auto number = reinterpret_cast<uint64_t>(handle);
  if (number > kPerThread) return name_of_key(number);
  const std::string of = current_context() > 0 ? " of GPU " + std::to_string(contexts.back()) : "";
  return std::to_string(number) + of;
}

std::string Device::name_of_key(uint64_t key) const {
  if (key > 0 && key >> kThreadShift == 0) {
    return std::to_string(key / kEpoch == epoch_ ? key % kEpoch : key);
  }
  const uint64_t of = key >> kDeviceShift, thread = (key >> kThreadShift) & 0xffff;
  return (thread > 0 ? "2" : "0") + (of > 0 ? " of GPU " + std::to_string(of) : std::string());
}

std::shared_ptr<Stream> Device::stream(uint64_t handle) {
  if (current_context() == kNoContext && handle <= kPerThread) return nullptr;
  auto& found = streams_[key(handle)];
  if (found == nullptr) {
    found = std::make_shared<Stream>();
    found->device = std::max(current_context(), 0);
    found->capturing = capturing_;
  }
  if (!found->destroyed) return found;
  log.violation("use of stream ", name(reinterpret_cast<void*>(handle)), ", which was destroyed");
  return nullptr;
}

std::shared_ptr<Stream> Device::stream_in_context(uint64_t handle, bool asks) {
  const auto found = stream(handle);
  const int current = current_context();
  if (found == nullptr || current == kNoContext || found->device == current) return found;
  if (asks && found->created && !found->is_callers) return found;
  log.violation("stream ", name(reinterpret_cast<void*>(handle)), " of GPU ", found->device,
                " is used in the context of GPU ", current);
  return found;
}

std::shared_ptr<Event> Device::event(uint64_t handle) {
  const auto found = events_.find(handle);
  if (found != events_.end()) return found->second;
  if (handle / kEpoch == epoch_) {
    log.violation("use of event ", int64_t(handle % kEpoch) - int64_t(kFirstEvent),
                  ", which does not exist");
  }
  return nullptr;
}

int Device::destroy_stream(uint64_t handle) {
  if (handle / kEpoch != epoch_ && streams_.count(handle) == 0) return kSuccess;
  const auto found = stream(handle);
  if (found == nullptr) return kInvalidHandle;
  found->destroyed = true;
  return kSuccess;
}

int Device::destroy_event(uint64_t handle) {
  if (handle / kEpoch != epoch_) return kSuccess;
  if (event(handle) == nullptr) return kInvalidHandle;
  events_.erase(handle);
  return kSuccess;
}

void Device::set_capturing(bool value) {
  capturing_ = value;
  for (const auto& [key, stream] : streams_) stream->capturing = value;
}

int Device::live_streams() const {
  int count = 0;
  for (const auto& [key, stream] : streams_) count += stream->created && !stream->destroyed;
  return count;
}

std::string Device::pending() const {
  std::string text;
  for (const auto& [key, stream] : streams_) {
    for (const Operation& operation : stream->queue) {
      text += "stream " + name_of_key(key) + ": " + operation.name + "\n";
    }
  }
  return text;
}

bool Device::in_use(uint64_t begin, uint64_t end, const Stream* except) const {
  for (const auto& [key, stream] : streams_) {
    if (stream.get() == except) continue;
    for (const Operation& operation : stream->queue) {
      if (operation.touches(begin, end)) return true;
    }
  }
  return false;
}

bool Device::is_idle() const {
  for (const auto& [key, stream] : streams_) {
    if (!stream->queue.empty()) return false;
  }
  return true;
}

void Device::lose(int code, int ordinal, bool happens) {
  faults.lose(code, ordinal);
  for (const auto& [key, stream] : streams_) {
    if (ordinal == kAll || stream->device == ordinal) stream->drop(happens);
  }
  settle();
  changed.notify_all();
}

void Device::set_link(Link link, unsigned slowness) {
  slowness_[link] = slowness;
  settle();
  changed.notify_all();
}

unsigned Device::slowness(const Stream& stream) const {
  if (stream.queue.empty() || !stream.queue.front().link) return 1;
  const auto found = slowness_.find(*stream.queue.front().link);
  return found == slowness_.end() ? 1 : found->second;
}

void Device::submit(Stream& stream, Operation operation) {
  check_access(operation, stream.device);
  const auto end_of = [this](uint64_t address) {
    const Range range = memory.find(address);
    return range.type == 2 ? range.device : kHost;
  };
  for (const Copy& copy : operation.copies) {
    const int dst = end_of(copy.dst), src = end_of(copy.src);
    if (dst == src) continue;
    operation.link =
        std::min(dst, src) == kHost ? Link(kHost, stream.device) : Link(std::minmax(dst, src));
  }
  stream.push(std::move(operation));
}

void Device::check_access(const Operation& operation, int ordinal) {
  const auto check = [&](uint64_t address) {
    const Range range = memory.find(address);
    if (range.type != 2 || range.device == ordinal || accesses.count({ordinal, range.device})) {
      return true;
    }
    log.violation(operation.name, " on GPU ", ordinal, " uses memory of GPU ", range.device,
                  " without access to it");
    return false;
  };
  for (const Copy& copy : operation.copies) {
    if (!check(copy.dst) || !check(copy.src)) return;
  }
  for (const Coding& coding : operation.codings) {
    for (const auto& [begin, end] : coding.memory) {
      if (!check(begin)) return;
    }
  }
}

void Device::check_addresses(const Operation& operation) {
  for (const Range& range : memory.elsewhere()) {
    if (!operation.touches(range.begin, range.end)) continue;
    log.violation(operation.name, " uses host memory that the device has at other addresses");
  }
}

void Device::reset() {
  for (const auto& [key, stream] : streams_) stream->drop();
  streams_.clear();
  events_.clear();
  ++epoch_;
  streams_made_ = events_made_ = 0;
  log.clear();
  memory.clear();
  faults = Faults();
  unreachable.clear();
  accesses.clear();
  opened.clear();
  waits_between_gpus = true;
  slowness_.clear();
  // It is a Hopper, can use 64-bit stream memory operations, and uses registered host memory at the
  // addresses of the process.
  attributes = {{75, 9}, {kRegisteredAtSameAddress, 1}, {122, 1}};
  initialized = 1;
  global_capture = capture_spoilt = 0;
  capturing_ = false;
  test_context = 0;
  mode_ = Mode::kImmediate;
  clock = 0;
  set_patience(10000);
  changed.notify_all();
}

}  // namespace simulated
