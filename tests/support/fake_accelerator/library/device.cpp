#include "device.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "memory.h"

namespace fake_accelerator {
namespace {

// Threads use these until the process ends, so nothing destroys them.
std::condition_variable& host() {  // whoever waits for devices on the host
  static auto* variable = new std::condition_variable;
  return *variable;
}

std::array<Device*, kDevices>& devices() {
  static auto* all = new std::array<Device*, kDevices>{new Device(0), new Device(1)};
  return *all;
}

bool started = false;  // a thread of a stream
bool forked = false;   // this process has no such threads, and its parent has

// A fork happens between the changes of other threads.
[[maybe_unused]] const bool handles_forks = [] {
  devices();
  pthread_atfork([] { devices_lock().lock(), memory_lock().lock(); },
                 [] { memory_lock().unlock(), devices_lock().unlock(); },
                 [] {
                   forked = started;
                   memory_lock().unlock(), devices_lock().unlock();
                 });
  return true;
}();

std::string name(int device) { return "fakeaccel:" + std::to_string(device); }

}  // namespace

std::mutex& devices_lock() {
  static auto* lock = new std::mutex;
  return *lock;
}

Stream::~Stream() {
  {
    Lock lock(devices_lock());
    stopping_ = true;
    wake_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

bool Stream::is_ready(const Work& work) const {
  if (work.waits_for && !work.waits_for->done) return false;
  if (work.released && !*work.released) return false;
  return !work.copies || !device.copies_held_ || device.copies_let_ > 0;
}

void Stream::work() {
  Lock lock(devices_lock());
  for (;;) {
    wake_.wait(lock, [this] { return stopping_ || (!queue_.empty() && is_ready(queue_.front())); });
    if (stopping_) return;
    Work& work = queue_.front();  // which stays where it is when others are added
    running_ = true;
    if (work.copies && device.copies_held_) --device.copies_let_;
    const std::string failure = run(work, lock);
    if (!failure.empty()) device.lose(failure, false);
    if (work.records) device.complete(work.records);
    queue_.pop_front();
    running_ = false;
    ++ended_;
    host().notify_all();
  }
}

std::string Stream::run(Work& work, Lock& lock) {
  if (!work.run) return "";
  const auto delay =
      work.copies ? device.copy_delay_ : std::chrono::duration<double>(std::chrono::seconds(0));
  lock.unlock();
  std::string failure;
  try {
    if (delay.count() > 0) std::this_thread::sleep_for(delay);
    work.run();
  } catch (const std::exception& error) {
    failure = name(device.index) + " stream " + std::to_string(id) + ", " + work.what + ": " +
              std::string(error.what()).substr(0, std::string(error.what()).find('\n'));
  }
  work.run = nullptr;  // what it holds is gone before anybody sees that it has run
  lock.lock();
  return failure;
}

void Stream::drop() {
  while (queue_.size() > (running_ ? 1 : 0)) {
    if (queue_.back().records) device.complete(queue_.back().records);
    queue_.pop_back();
    ++ended_;
  }
}

Device& Device::at(int index) {
  if (index < 0 || index >= kDevices)
    throw Failure(name(index) + " does not exist: there are " + std::to_string(kDevices) +
                  " devices");
  return *devices()[index];
}

Device::Device(int index) : index(index) { streams_[0] = std::make_unique<Stream>(*this, 0); }

void Device::check() const {
  if (forked)
    throw Failure(name(index) +
                  " cannot be used in a forked process: its parent had used it before");
  if (!lost_.empty()) throw Failure(name(index) + " is lost: " + lost_);
}

bool Device::enter(Call call) {
  Lock lock(devices_lock());
  check();
  const int number = static_cast<int>(call);
  const int64_t count = ++counters_.calls[number];
  Fault& fault = faults_[number];
  if (!fault.times) return false;
  if (fault.skip) return --fault.skip, false;
  --fault.times;
  if (fault.when_it_runs) return true;
  throw Failure(name(index) + ": " + kCallNames[number] + " call " + std::to_string(count) +
                " fails, as the test wants");
}

Stream& Device::find(StreamId stream) {
  const auto found = streams_.find(stream);
  if (found == streams_.end())
    throw Failure("stream " + std::to_string(stream) + " of " + name(index) +
                  " does not exist. Streams end with the test that made them");
  return *found->second;
}

StreamId Device::create_stream() {
  Lock lock(devices_lock());
  check();
  const StreamId id = next_stream_++;
  streams_[id] = std::make_unique<Stream>(*this, id);
  return id;
}

void* Device::handle(StreamId stream) {
  Lock lock(devices_lock());
  return &find(stream);
}

void Device::queue(Stream& stream, Work work) {
  check();
  if (!stream.thread_.joinable()) {
    stream.thread_ = std::thread([&stream] { stream.work(); });
    started = true;
  }
  stream.queue_.push_back(std::move(work));
  ++stream.submitted_;
  stream.wake_.notify_all();
}

void Device::submit(StreamId stream, Work work, bool fails) {
  if (fails) work.run = [] { throw Failure("it fails, as the test wants"); };
  Lock lock(devices_lock());
  queue(find(stream), std::move(work));
}

bool Device::is_idle(StreamId stream) {
  Lock lock(devices_lock());
  check();
  return find(stream).queue_.empty();
}

bool Device::is_running() const {
  return std::any_of(streams_.begin(), streams_.end(),
                     [](const auto& entry) { return entry.second->running_; });
}

// After a loss nothing runs any more when it throws: the caller may free its memory.
template <class Done>
void Device::wait_on_host(Lock& lock, Done done) {
  check();
  host().wait(lock, [&] { return done() || (!lost_.empty() && !is_running()); });
  check();
}

void Device::synchronize(StreamId id) {
  Lock lock(devices_lock());
  Stream& stream = find(id);
  wait_on_host(lock, [&stream, until = stream.submitted_] { return stream.ended_ >= until; });
}

void Device::synchronize() {
  Lock lock(devices_lock());
  std::vector<std::pair<Stream*, int64_t>> until;
  for (const auto& [id, stream] : streams_) until.emplace_back(stream.get(), stream->submitted_);
  wait_on_host(lock, [&until] {
    return std::all_of(until.begin(), until.end(),
                       [](const auto& entry) { return entry.first->ended_ >= entry.second; });
  });
}

std::shared_ptr<Recording> Device::record(StreamId stream) {
  Work work;
  work.what = "record an event";
  auto recording = work.records = std::make_shared<Recording>();
  submit(stream, std::move(work));
  return recording;
}

void Device::complete(const std::shared_ptr<Recording>& recording) {
  recording->time = Clock::now();
  recording->done = true;
  for (Stream* stream : recording->waiting) stream->wake_.notify_all();
  recording->waiting.clear();
}

void Device::wait(StreamId id, const std::shared_ptr<Recording>& recording) {
  Work work;
  work.what = "wait for an event";
  work.waits_for = recording;
  Lock lock(devices_lock());
  Stream& stream = find(id);
  queue(stream, std::move(work));
  if (!recording->done) recording->waiting.push_back(&stream);
}

bool Device::is_done(const Recording& recording) {
  Lock lock(devices_lock());
  check();
  return recording.done;
}

void Device::synchronize(const Recording& recording) {
  Lock lock(devices_lock());
  wait_on_host(lock, [&recording] { return recording.done; });
}

void Device::release(StreamId id, const std::shared_ptr<void>& memory) noexcept {
  Lock lock(devices_lock());
  const auto found = streams_.find(id);
  if (found == streams_.end() || found->second->queue_.empty()) return;
  found->second->queue_.back().freed_after.push_back(memory);
}

void Device::wake() {
  for (const auto& [id, stream] : streams_) stream->wake_.notify_all();
  host().notify_all();
}

void Device::hold(StreamId stream, const std::shared_ptr<bool>& released) {
  Work work;
  work.what = "hold";
  work.released = released;
  submit(stream, std::move(work));
}

void Device::release_hold(const std::shared_ptr<bool>& released) {
  Lock lock(devices_lock());
  *released = true;
  for (Device* device : devices()) device->wake();
}

void Device::hold_copies(bool held) {
  Lock lock(devices_lock());
  copies_held_ = held;
  copies_let_ = 0;
  wake();
}

void Device::let_copies(int64_t count) {
  Lock lock(devices_lock());
  copies_let_ += count;
  wake();
}

void Device::set_copy_delay(std::chrono::duration<double> delay) {
  Lock lock(devices_lock());
  copy_delay_ = delay;
}

void Device::fail(Call call, int64_t nth, int64_t times, bool when_it_runs) {
  Lock lock(devices_lock());
  faults_[static_cast<int>(call)] = {nth - 1, times, when_it_runs};
}

void Device::lose(const std::string& message) {
  Lock lock(devices_lock());
  lose(message, true);
}

void Device::lose(const std::string& message, bool wanted) {
  if (!lost_.empty()) return;
  lost_ = message;
  if (!wanted) error_ = message;
  for (const auto& [id, stream] : streams_) stream->drop();
  wake();
}

std::string Device::error() {
  Lock lock(devices_lock());
  return error_;
}

void Device::forget_error() {
  Lock lock(devices_lock());
  error_.clear();
}

std::string Device::pending() {
  Lock lock(devices_lock());
  std::string text;
  for (const auto& [id, stream] : streams_)
    for (const Work& work : stream->queue_)
      text += name(index) + " stream " + std::to_string(id) + ": " + work.what + "\n";
  return text;
}

Counters Device::counters() {
  Lock lock(devices_lock());
  return counters_;
}

void Device::count(const std::function<void(Counters&)>& add) {
  Lock lock(devices_lock());
  add(counters_);
}

void Device::reset() {
  std::vector<std::unique_ptr<Stream>> ended;
  Lock lock(devices_lock());
  for (Device* device : devices()) {
    device->faults_ = {};
    device->copies_held_ = false;
    device->copy_delay_ = device->copy_delay_.zero();
    for (const auto& [id, stream] : device->streams_)
      for (Work& work : stream->queue_)
        if (work.released) *work.released = true;
    device->wake();
  }
  host().wait(lock, [] {
    return std::all_of(devices().begin(), devices().end(), [](Device* device) {
      return std::all_of(device->streams_.begin(), device->streams_.end(),
                         [](const auto& entry) { return entry.second->queue_.empty(); });
    });
  });
  for (Device* device : devices()) {
    device->lost_.clear();
    device->error_.clear();
    const int64_t live_events = device->counters_.live_events;
    device->counters_ = {};
    device->counters_.live_events = live_events;
    for (auto& [id, stream] : device->streams_)
      if (id) ended.push_back(std::move(stream));
    device->streams_.erase(std::next(device->streams_.begin()), device->streams_.end());
  }
  lock.unlock();  // before the streams end
}

void Device::stop() {
  std::vector<std::thread> threads;
  {
    Lock lock(devices_lock());
    if (forked) return;
    for (Device* device : devices()) {
      device->lose("the process ends", true);
      for (auto& [id, stream] : device->streams_) {
        stream->stopping_ = true;
        threads.push_back(std::move(stream->thread_));
      }
      device->wake();
    }
  }
  for (std::thread& thread : threads)
    if (thread.joinable()) thread.join();
}

bool Device::is_forked() { return forked; }

}  // namespace fake_accelerator
