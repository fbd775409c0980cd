#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>

#include "faults.h"
#include "log.h"
#include "memory.h"
#include "stream.h"

namespace stub {

enum class Mode {
  kImmediate,  // what can run runs within the call
  kManual,     // it runs when the test says so
  kThreaded,   // a thread of the stub runs it, the streams in a random order
};

// All state of the driver. Whoever reads or changes it has locked `mutex`.
class Device {
 public:
  std::mutex mutex;
  std::condition_variable changed;
  Log log;
  Memory memory;
  Faults faults;
  std::map<int, int> attributes;
  int initialized = 1, global_capture = 0, capture_spoilt = 0;
  double clock = 0;  // milliseconds; each copy takes one

  // Handles are never used twice, so one from before a reset is known as such.
  uint64_t create_stream();
  uint64_t create_event(bool timed);
  int destroy_stream(uint64_t handle);
  int destroy_event(uint64_t handle);
  // Null, and a line in the log, for one that was destroyed.
  std::shared_ptr<Stream> stream(uint64_t handle);
  std::shared_ptr<Event> event(uint64_t handle);
  void set_capturing(bool value);  // of all streams, also those to come
  int live_streams() const;
  int live_events() const { return static_cast<int>(events_.size()); }
  // As the log has it: the numbers begin again after a reset.
  std::string name(const void* stream) const;
  std::string pending() const;
  bool in_use(uint64_t begin, uint64_t end) const;

  bool step(Stream& stream);
  int run(Stream& stream);
  int run();
  std::shared_ptr<bool> hold(uint64_t stream);
  void settle() { mode_ == Mode::kImmediate ? run() : 0; }
  // Waits, and lets `stream` and what it waits for go on, until `done()` or the device is lost.
  // Aborts the process when that takes too long.
  template <typename Done>
  int wait(std::unique_lock<std::mutex>& lock, const std::string& what, uint64_t stream,
           const Done& done) {
    const auto deadline = std::chrono::steady_clock::now() + patience_;
    while (!faults.lost() && !done()) {
      if (mode_ != Mode::kThreaded && advance(stream, 0)) continue;
      if (std::chrono::steady_clock::now() > deadline) give_up(what);
      changed.wait_for(lock, std::chrono::milliseconds(1));
    }
    return faults.lost();
  }

  void lose(int code);
  void reset();
  void set_patience(int milliseconds) { patience_ = std::chrono::milliseconds(milliseconds); }
  // Without the lock: they start and end the thread.
  void set_mode(Mode mode, unsigned seed);
  bool join(int milliseconds);

 private:
  void execute(Stream& stream);
  void execute_a_part(Stream& stream);
  bool advance(uint64_t stream, size_t depth);
  bool is_idle() const;
  void work();
  [[noreturn]] void give_up(const std::string& what) const;

  std::map<uint64_t, std::shared_ptr<Stream>> streams_;
  std::map<uint64_t, std::shared_ptr<Event>> events_;
  uint64_t epoch_ = 0, streams_made_ = 0, events_made_ = 0;
  std::chrono::milliseconds patience_{10000};
  Mode mode_ = Mode::kImmediate;
  bool stopping_ = false, capturing_ = false;
  std::mt19937 random_;
  std::thread worker_;
};

Device& device();

}  // namespace stub
