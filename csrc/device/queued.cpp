#include "device/queued.h"

#include <chrono>
#include <utility>

#include "check.h"

namespace kvswap {

struct QueuedDevice::QueuedStream {
  uint64_t number;
  Commands farewell;  // tells Python that the stream is gone
};

struct QueuedDevice::QueuedEvent {
  uint64_t number;
  bool timed;
  Commands farewell;
  uint64_t records = 0, happened = 0;  // records that were appended, that have happened
  double seconds = 0;                  // of the last one that has happened
  std::string error;                   // why the transfer that it ends has failed
};

// The copies of one channel, as commands.
class QueuedCopier : public Copier {
 public:
  QueuedCopier(QueuedDevice& device, Stream stream, bool to_host)
      : device_(device),
        stream_(stream),
        to_host_(to_host),
        last_record_(QueuedDevice::make_command(CommandKind::kRecord)),
        end_(device.create_event(/*timed=*/false)) {}
  ~QueuedCopier() override { device_.destroy_event(end_); }

  Stream copy(const std::vector<PartCopy>& parts, Event start, bool, CopyPosition& next,
              uint64_t&) override {
    QueuedDevice::Commands commands;
    for (const PartCopy& part : parts) {
      QueuedDevice::Commands blocks = make(start);
      Command& command = blocks.front();
      command.group = part.group_number;
      command.first_slab = part.slabs.begin;
      command.last_slab = part.slabs.end;
      command.blocks.assign(part.blocks, part.blocks + part.count);
      command.slots.assign(part.slots, part.slots + part.count);
      commands.splice(commands.end(), blocks);
    }
    // Also without any part: the command tells Python which transfer the next event ends.
    if (commands.empty()) commands = make(start);
    device_.append(std::move(commands));
    next.part = parts.size();
    return stream_;
  }

  bool synchronize() noexcept override {
    auto& event = *static_cast<QueuedDevice::QueuedEvent*>(end_);
    std::unique_lock<std::mutex> lock(device_.mutex_);
    QueuedDevice::Commands record;
    if (event.records == event.happened) record.swap(last_record_);
    // Called once for each failure, and the command is made anew only after that: the same thread
    // may find none after several failures without memory. The device is then given up.
    if (record.empty()) {
      lock.unlock();
      device_.lose("out of host memory");
      return false;
    }
    record.front().stream = static_cast<QueuedDevice::QueuedStream*>(stream_)->number;
    record.front().event = event.number;
    record.front().record = ++event.records;
    device_.append(std::move(record), lock);
    lock.unlock();
    const bool is_alive = device_.wait_until_happened(event);
    try {
      last_record_ = QueuedDevice::make_command(CommandKind::kRecord);
    } catch (const std::bad_alloc&) {
    }
    return is_alive;
  }

  size_t num_events() const override { return 1; }

 private:
  QueuedDevice::Commands make(Event start) const {
    QueuedDevice::Commands made = QueuedDevice::make_command(CommandKind::kBlocks);
    made.front().stream = static_cast<QueuedDevice::QueuedStream*>(stream_)->number;
    made.front().event = static_cast<QueuedDevice::QueuedEvent*>(start)->number;
    made.front().to_host = to_host_;
    return made;
  }

  QueuedDevice& device_;
  const Stream stream_;
  const bool to_host_;
  QueuedDevice::Commands last_record_;  // for synchronize()
  const Event end_;                     // which it records
};

QueuedDevice::QueuedDevice(int index, std::string name) : Device(index), name_(std::move(name)) {}

QueuedDevice::~QueuedDevice() = default;

QueuedDevice::Commands QueuedDevice::make_command(CommandKind kind) {
  Commands made(1);
  made.front().kind = kind;
  return made;
}

void QueuedDevice::append(Commands command) noexcept {
  const std::unique_lock<std::mutex> lock(mutex_);
  append(std::move(command), lock);
}

void QueuedDevice::append(Commands command, const std::unique_lock<std::mutex>&) noexcept {
  if (lost_) return;
  commands_.splice(commands_.end(), command);
  work_.notify_one();
}

// For Python.

int QueuedDevice::wait(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto has_commands = [&] { return !first_.empty() || !commands_.empty(); };
  const auto is_over = [&] { return stopping_ || woken_ || has_commands(); };
  work_.wait_for(lock, std::chrono::duration<double>(seconds), is_over);
  woken_ = false;
  return stopping_ ? -1 : has_commands();
}

void QueuedDevice::wake() {
  const std::unique_lock<std::mutex> lock(mutex_);
  woken_ = true;
  work_.notify_all();
}

const Command* QueuedDevice::first() noexcept {
  const std::unique_lock<std::mutex> lock(mutex_);
  if (first_.empty() && !commands_.empty()) {
    first_.splice(first_.end(), commands_, commands_.begin());
  }
  return first_.empty() ? nullptr : &first_.front();
}

bool QueuedDevice::is_empty() {
  const std::unique_lock<std::mutex> lock(mutex_);
  return first_.empty() && commands_.empty();
}

void QueuedDevice::done() noexcept {
  Commands done;  // freed without the lock
  const std::unique_lock<std::mutex> lock(mutex_);
  done.swap(first_);
}

void QueuedDevice::on_happened(uint64_t number, uint64_t record, double seconds,
                               const char* error) noexcept {
  const std::unique_lock<std::mutex> lock(mutex_);
  const auto found = events_.find(number);
  if (found == events_.end()) return;  // it was destroyed
  QueuedEvent& event = *found->second;
  event.happened = record;
  event.seconds = seconds;
  try {
    event.error = error == nullptr ? "" : error;
  } catch (const std::bad_alloc&) {
    event.error = "failed";  // short enough to need no memory
  }
  happened_.notify_all();
}

void QueuedDevice::lose(const char* error) noexcept {
  Commands dropped;
  const std::unique_lock<std::mutex> lock(mutex_);
  if (std::exchange(lost_, true)) return;
  try {
    lost_reason_ = error;
  } catch (const std::bad_alloc&) {  // without a reason
  }
  dropped.swap(commands_);
  happened_.notify_all();
}

void QueuedDevice::stop() {
  const std::unique_lock<std::mutex> lock(mutex_);
  stopping_ = true;
  work_.notify_all();
}

Event QueuedDevice::make_recorded_event(uint64_t& number) {
  const Event event = create_event(/*timed=*/false);
  auto& made = *static_cast<QueuedEvent*>(event);
  const std::unique_lock<std::mutex> lock(mutex_);
  made.records = 1;
  number = made.number;
  return event;
}

// For csrc/offload.

Stream QueuedDevice::create_stream() {
  auto stream = std::make_unique<QueuedStream>();
  stream->farewell = make_command(CommandKind::kDestroyStream);
  const std::unique_lock<std::mutex> lock(mutex_);
  stream->number = stream->farewell.front().stream = ++last_number_;
  return stream.release();
}

void QueuedDevice::destroy_stream(Stream stream) noexcept {
  const std::unique_ptr<QueuedStream> gone(static_cast<QueuedStream*>(stream));
  append(std::move(gone->farewell));
}

bool QueuedDevice::is_alive(Stream) noexcept {
  const std::unique_lock<std::mutex> lock(mutex_);
  return !lost_;
}

Event QueuedDevice::create_event(bool timed) {
  auto event = std::make_unique<QueuedEvent>();
  event->timed = timed;
  event->farewell = make_command(CommandKind::kDestroyEvent);
  const std::unique_lock<std::mutex> lock(mutex_);
  event->number = event->farewell.front().event = ++last_number_;
  events_.emplace(event->number, event.get());
  return event.release();
}

void QueuedDevice::destroy_event(Event event) noexcept {
  const std::unique_ptr<QueuedEvent> gone(static_cast<QueuedEvent*>(event));
  const std::unique_lock<std::mutex> lock(mutex_);
  events_.erase(gone->number);
  append(std::move(gone->farewell), lock);
}

void QueuedDevice::record_event(Event event, Stream stream, const char*) {
  Commands command = make_command(CommandKind::kRecord);
  auto& recorded = *static_cast<QueuedEvent*>(event);
  command.front().stream = static_cast<QueuedStream*>(stream)->number;
  command.front().event = recorded.number;
  command.front().timed = recorded.timed;
  const std::unique_lock<std::mutex> lock(mutex_);
  command.front().record = ++recorded.records;
  append(std::move(command), lock);
}

void QueuedDevice::wait_event(Stream stream, Event event, const char*) {
  Commands command = make_command(CommandKind::kWait);
  command.front().stream = static_cast<QueuedStream*>(stream)->number;
  command.front().event = static_cast<QueuedEvent*>(event)->number;
  append(std::move(command));
}

void QueuedDevice::wait_event(const StreamRef& stream, Event event) {
  Commands command = make_command(CommandKind::kCallerWait);
  command.front().stream = reinterpret_cast<uint64_t>(stream.handle);
  command.front().event = static_cast<QueuedEvent*>(event)->number;
  append(std::move(command));
}

bool QueuedDevice::has_happened(Event event) {
  const auto& asked = *static_cast<QueuedEvent*>(event);
  const std::unique_lock<std::mutex> lock(mutex_);
  KVSWAP_CHECK(!lost_, name_, ": ", lost_reason_);
  return asked.happened == asked.records;
}

double QueuedDevice::seconds_between(Event start, Event end) {
  const auto& first = *static_cast<QueuedEvent*>(start);
  const auto& last = *static_cast<QueuedEvent*>(end);
  const std::unique_lock<std::mutex> lock(mutex_);
  KVSWAP_CHECK(last.error.empty(), last.error);
  return last.seconds - first.seconds;
}

bool QueuedDevice::wait_until_happened(const QueuedEvent& event) {
  std::unique_lock<std::mutex> lock(mutex_);
  happened_.wait(lock, [&] { return lost_ || event.happened == event.records; });
  return !lost_;
}

std::unique_ptr<Copier> QueuedDevice::make_copier(Stream copies, bool to_host) {
  return std::make_unique<QueuedCopier>(*this, copies, to_host);
}

}  // namespace kvswap
