#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "faults.h"
#include "log.h"
#include "memory.h"
#include "stream.h"

namespace simulated {

enum class Mode {
  kImmediate,  // what can run runs within the call
  kManual,     // it runs when the test says so
  kThreaded,   // a thread of the driver runs it, the streams in a random order
};

// The contexts of the calling thread, each named by its device, whose primary context it is. The
// last is current.
inline thread_local std::vector<int> contexts;
constexpr int kNoContext = -1, kDevices = 8;
// CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM.
constexpr int kRegisteredAtSameAddress = 91;
inline int current_context() { return contexts.empty() ? kNoContext : contexts.back(); }
inline int device_of(const void* context) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1;
}

inline thread_local bool is_test = false;  // the test calls, not the library

// Makes the context of a device current for calls of the test, which log nothing.
class InContext {
 public:
  explicit InContext(int device) { contexts.push_back(device); }
  ~InContext() { contexts.pop_back(); }
  InContext(const InContext&) = delete;
  InContext& operator=(const InContext&) = delete;
};

// All state of the driver, of all GPUs. Whoever reads or changes it has locked `mutex`.
//
// Handles 0 and 1 (the legacy default stream) and 2 (that of the thread) mean a stream of the
// context that is current, as in CUDA: the same handle is another stream in another context. CUDA
// takes every other stream, and every event, in any context, but records an event only in a stream
// of its own device, and launches kernels only in a stream of the current context. The simulator
// also writes down when a stream is given work or asked in another context than its own: the same
// call with handle 0 would mean another stream.
//
// What is not simulated: contexts other than the primary ones, the work of the legacy default
// stream and of blocking streams waiting for each other, and the calls that need a context but
// neither a stream nor an event.
class Device {
 public:
  std::mutex mutex;
  std::condition_variable changed;
  Log log;
  Memory memory;
  Faults faults;
  std::map<int, int> attributes;
  int initialized = 1, global_capture = 0, capture_spoilt = 0;
  std::set<Link> unreachable;  // GPUs that cannot be peers; the smaller one first
  bool waits_between_gpus =
      true;  // false: those for another GPU's events, and for words, do nothing
  std::set<std::pair<int, uint64_t>> opened;  // by this GPU: allocations of other processes
  std::set<std::pair<int, int>> accesses;     // enabled by the first GPU to memory of the second
  double clock = 0;                           // milliseconds; each copy takes one
  int test_context = 0;                       // in which the test calls

  // Handles are never used twice, so one from before a reset is known as such.
  uint64_t create_stream();
  uint64_t create_event(bool timed);
  int destroy_stream(uint64_t handle);
  int destroy_event(uint64_t handle);
  // What a handle means in the current context: a number that no other stream has.
  uint64_t key(uint64_t handle) const;
  // Null for a default stream without a context; null, and a line in the log, for one that was
  // destroyed. A number that is new, above those of
  // the default streams, becomes a stream of the current context.
  std::shared_ptr<Stream> stream(uint64_t handle);
  // The same for a call of the driver: the context should be that of the stream. asks: it gives the
  // stream no work but a wait, which CUDA takes in any context. Only handles of the caller's may
  // be those of default streams.
  std::shared_ptr<Stream> stream_in_context(uint64_t handle, bool asks);
  std::shared_ptr<Event> event(uint64_t handle);
  void set_capturing(bool value);  // of all streams, also those to come
  int live_streams() const;
  int live_events() const { return static_cast<int>(events_.size()); }
  // As the log has it: the numbers begin again after a reset.
  std::string name(const void* handle) const;
  std::string pending() const;
  // Writes down if the device itself uses addresses that only the process has.
  void check_addresses(const Operation& operation);
  // Gives the stream an operation. Writes down if its GPU would use memory of another GPU without
  // access to it: copies would go through the host.
  void submit(Stream& stream, Operation operation);
  // Whether pending operations touch the memory, those of one stream left out.
  bool in_use(uint64_t begin, uint64_t end, const Stream* except = nullptr) const;

  bool step(Stream& stream);
  int run(Stream& stream);
  int run();
  std::shared_ptr<bool> hold(Stream& stream);
  void settle() { mode_ == Mode::kImmediate ? run() : 0; }
  // Waits, and lets the stream and what it waits for go on, until `done()` or the device is lost.
  // Aborts the process when that takes too long.
  template <typename Done>
  int wait(std::unique_lock<std::mutex>& lock, const std::string& what, int ordinal, uint64_t key,
           const Done& done) {
    const auto deadline = std::chrono::steady_clock::now() + patience_;
    while (!faults.lost(ordinal) && !done()) {
      if (mode_ != Mode::kThreaded && advance(key, 0)) continue;
      if (std::chrono::steady_clock::now() > deadline) give_up(what);
      changed.wait_for(lock, std::chrono::milliseconds(1));
    }
    return faults.lost(ordinal);
  }

  // The stream and what it waits for go on by a step, in the manual mode.
  void go_on(uint64_t key) { mode_ == Mode::kManual ? advance(key, 0) : false; }

  // happens: whether events that are lost with a GPU count as happened for the others.
  void lose(int code, int ordinal, bool happens);
  // One copy in `slowness` goes at once, in the threaded mode; at 0 none does, in no mode.
  void set_link(Link link, unsigned slowness);
  void reset();
  void set_patience(int milliseconds) { patience_ = std::chrono::milliseconds(milliseconds); }
  // Without the lock: they start and end the thread.
  void set_mode(Mode mode, unsigned seed);

 private:
  void check_access(const Operation& operation, int ordinal);
  unsigned slowness(const Stream& stream) const;
  bool is_ready(const Stream& stream) const { return stream.ready() && slowness(stream) != 0; }
  void execute(Stream& stream);
  void execute_a_part(Stream& stream);
  bool advance(uint64_t key, size_t depth);
  bool is_idle() const;
  void work();
  [[noreturn]] void give_up(const std::string& what) const;

  std::string name_of_key(uint64_t key) const;

  std::map<uint64_t, std::shared_ptr<Stream>> streams_;  // by their keys
  std::map<uint64_t, std::shared_ptr<Event>> events_;
  std::map<Link, unsigned> slowness_;
  uint64_t epoch_ = 0, streams_made_ = 0, events_made_ = 0;
  std::chrono::milliseconds patience_{10000};
  Mode mode_ = Mode::kImmediate;
  bool stopping_ = false, capturing_ = false;
  std::mt19937 random_;
  std::thread worker_;
};

Device& device();

}  // namespace simulated
