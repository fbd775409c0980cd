#include "device.h"

namespace stub {
namespace {

constexpr uint64_t kEpoch = 1000000, kFirstStream = 100, kFirstEvent = 500000;

}  // namespace

Device& device() {
  static auto& instance = *new Device;  // never destroyed: threads may still call at exit
  return instance;
}

uint64_t Device::create_stream() {
  const uint64_t handle = epoch_ * kEpoch + kFirstStream + ++streams_made_;
  streams_[handle] = std::make_shared<Stream>();
  streams_[handle]->created = true;
  streams_[handle]->capturing = capturing_;
  return handle;
}

uint64_t Device::create_event(bool timed) {
  const uint64_t handle = epoch_ * kEpoch + kFirstEvent + ++events_made_;
  events_[handle] = std::make_shared<Event>();
  events_[handle]->number = static_cast<int>(events_made_);
  events_[handle]->timed = timed;
  return handle;
}

std::string Device::name(const void* stream) const {
  const auto handle = reinterpret_cast<uint64_t>(stream);
  return std::to_string(handle / kEpoch == epoch_ ? handle % kEpoch : handle);
}

std::shared_ptr<Stream> Device::stream(uint64_t handle) {
  auto& found = streams_[handle == 1 ? 0 : handle];  // both are the legacy default stream
  if (found == nullptr) {
    found = std::make_shared<Stream>();
    found->capturing = capturing_;
  }
  if (!found->destroyed) return found;
  log.violation("use of stream ", name(reinterpret_cast<void*>(handle)), ", which was destroyed");
  return nullptr;
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
  for (const auto& [handle, stream] : streams_) stream->capturing = value;
}

int Device::live_streams() const {
  int count = 0;
  for (const auto& [handle, stream] : streams_) count += stream->created && !stream->destroyed;
  return count;
}

std::string Device::pending() const {
  std::string text;
  for (const auto& [handle, stream] : streams_) {
    for (const Operation& operation : stream->queue) {
      text += "stream " + name(reinterpret_cast<void*>(handle)) + ": " + operation.name + "\n";
    }
  }
  return text;
}

bool Device::in_use(uint64_t begin, uint64_t end) const {
  for (const auto& [handle, stream] : streams_) {
    for (const Operation& operation : stream->queue) {
      if (operation.touches(begin, end)) return true;
    }
  }
  return false;
}

bool Device::is_idle() const {
  for (const auto& [handle, stream] : streams_) {
    if (!stream->queue.empty()) return false;
  }
  return true;
}

void Device::lose(int code) {
  faults.lose(code);
  for (const auto& [handle, stream] : streams_) stream->drop();
  changed.notify_all();
}

void Device::reset() {
  for (const auto& [handle, stream] : streams_) stream->drop();
  streams_.clear();
  events_.clear();
  ++epoch_;
  streams_made_ = events_made_ = 0;
  log.clear();
  memory.clear();
  faults = Faults();
  // It is a Hopper, and can use 64-bit stream memory operations.
  attributes = {{75, 9}, {122, 1}};
  initialized = 1;
  global_capture = capture_spoilt = 0;
  capturing_ = false;
  mode_ = Mode::kImmediate;
  clock = 0;
  set_patience(10000);
  changed.notify_all();
}

}  // namespace stub
