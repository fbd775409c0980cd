// How work is done: within a call, by the test, or by a thread.
#include <cstdio>
#include <cstdlib>

#include "device.h"

namespace simulated {

void Device::execute(Stream& stream) {
  Operation& operation = stream.queue.front();
  for (const Copy& copy : operation.copies) copy.run();
  for (const Coding& coding : operation.codings) coding.run();
  if (operation.kind == Operation::kCopy) clock += 1;
  if (operation.kind == Operation::kRecord) {
    operation.record->happened = true;
    operation.record->time = clock;
  }
  if (operation.kind == Operation::kWriteValue) {
    __atomic_store_n(reinterpret_cast<uint64_t*>(operation.address), operation.value,
                     __ATOMIC_RELEASE);
  }
  stream.pop();
  changed.notify_all();
}

// The fragments of a batch and the slots of a launch go in any order, and other streams go on
// between them.
void Device::execute_a_part(Stream& stream) {
  const auto run_any = [this](auto& parts) {
    std::swap(parts[random_() % parts.size()], parts.back());
    parts.back().run();
    parts.pop_back();
  };
  Operation& operation = stream.queue.front();
  if (operation.copies.size() > 1) return run_any(operation.copies);
  if (operation.codings.size() > 1) return run_any(operation.codings);
  execute(stream);
}

bool Device::step(Stream& stream) {
  if (!is_ready(stream)) return false;
  execute(stream);
  return true;
}

int Device::run(Stream& stream) {
  int count = 0;
  while (step(stream)) ++count;
  return count;
}

int Device::run() {
  int total = 0;
  for (int count = 1; count > 0; total += count) {
    count = 0;
    for (const auto& [key, stream] : streams_) count += run(*stream);
  }
  return total;
}

std::shared_ptr<bool> Device::hold(Stream& stream) {
  const auto released = std::make_shared<bool>(false);
  Operation operation{Operation::kHold};
  operation.released = released;
  operation.name = "hold";
  stream.push(std::move(operation));
  return released;
}

// Runs one operation that the stream needs to go on; false when there is none.
bool Device::advance(uint64_t key, size_t depth) {
  const auto entry = streams_.find(key);
  if (entry == streams_.end() || entry->second->queue.empty()) return false;
  if (step(*entry->second)) return true;
  const Operation& blocked = entry->second->queue.front();
  if (depth > streams_.size()) return false;
  if (blocked.kind == Operation::kWait) return advance(blocked.record->stream, depth + 1);
  if (blocked.kind != Operation::kWaitValue) return false;
  for (const auto& [other, stream] : streams_) {
    if (other == key) continue;  // what it writes later does not let it go on
    for (const Operation& operation : stream->queue) {
      const bool writes = operation.kind == Operation::kWriteValue;
      if (writes && operation.address == blocked.address) return advance(other, depth + 1);
    }
  }
  return false;
}

void Device::give_up(const std::string& what) const {
  std::fprintf(stderr, "the simulated driver: %s waits for ever; pending:\n%s", what.c_str(),
               pending().c_str());
  std::fflush(stderr);
  std::abort();
}

void Device::set_mode(Mode mode, unsigned seed) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    stopping_ = true;
    changed.notify_all();
  }
  if (worker_.joinable()) worker_.join();
  const std::lock_guard<std::mutex> lock(mutex);
  stopping_ = false;
  mode_ = mode;
  random_.seed(seed);
  settle();
  if (mode == Mode::kThreaded) worker_ = std::thread([this] { work(); });
}

void Device::work() {
  std::unique_lock<std::mutex> lock(mutex);
  while (!stopping_) {
    std::vector<std::shared_ptr<Stream>> ready;
    bool has_slow = false;
    for (const auto& [key, stream] : streams_) {
      if (!is_ready(*stream)) continue;
      const unsigned slow = slowness(*stream);
      if (slow == 1 || random_() % slow == 0) {
        ready.push_back(stream);
      } else {
        has_slow = true;
      }
    }
    if (ready.empty() && has_slow) {  // their turn comes
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
      continue;
    }
    if (ready.empty()) {
      // A value that a stream waits for changes without a word.
      changed.wait_for(lock, std::chrono::microseconds(is_idle() ? 50000 : 200));
      continue;
    }
    execute_a_part(*ready[random_() % ready.size()]);
    const unsigned delay = random_() % 8;
    lock.unlock();
    if (delay == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
    if (delay < 4) std::this_thread::yield();
    lock.lock();
  }
}

}  // namespace simulated
