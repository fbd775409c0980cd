// Devices whose streams are threads. Knows neither PyTorch nor memory.
//
// One lock guards all devices: what a test sees of them is one state, and no order of locks is
// needed.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace fake_accelerator {

constexpr int kDevices = 2;

using Clock = std::chrono::steady_clock;
using StreamId = int64_t;  // of one device; 0 is its default stream
using Lock = std::unique_lock<std::mutex>;

// A call that fails: because a test wants it, on a lost device, or because it is wrong.
struct Failure : std::runtime_error {
  using runtime_error::runtime_error;
};

// Calls that are counted, and that a test can make fail.
enum class Call { kAllocate, kCopy, kKernel, kCreateStream, kQuery, kRecord, kSynchronize, kWait };
constexpr std::array<const char*, 8> kCallNames = {
    "allocate", "copy", "kernel", "create_stream", "query", "record", "synchronize", "wait"};

class Stream;

// One recording of an event. A wait is for the recording that was the event's last at that time.
struct Recording {
  bool done = false;
  Clock::time_point time;
  std::vector<Stream*> waiting;
};

// An operation of a stream.
struct Work {
  std::string what;                      // as pending() shows it
  std::function<void()> run;             // in the stream's thread, without the lock
  std::shared_ptr<Recording> waits_for;  // it starts once this is done,
  std::shared_ptr<bool> released;        // and this is true;
  bool copies = false;                   // between host and device: Device::hold_copies() stops it
  std::shared_ptr<Recording> records;    // done when it has run
  std::vector<std::shared_ptr<void>> freed_after;
};

class Device;

class Stream {
 public:
  Stream(Device& device, StreamId id) : device(device), id(id) {}
  ~Stream();  // the caller does not have the lock

  Device& device;
  const StreamId id;

 private:
  friend class Device;

  void work();  // the thread
  bool is_ready(const Work& work) const;
  std::string run(Work& work, Lock& lock);  // why it failed, or nothing
  void drop();                              // all that has not started

  std::deque<Work> queue_;  // the first is the one that runs, if one does
  std::condition_variable wake_;
  std::thread thread_;  // started with the first work
  bool running_ = false;
  bool stopping_ = false;
  int64_t submitted_ = 0;
  int64_t ended_ = 0;
};

// What a test can read. Mirrored by fake_accelerator/accelerator.py.
struct Counters {
  int64_t calls[kCallNames.size()];
  int64_t copies_to_device, copies_to_host;
  int64_t live_events;
};

class Device {
 public:
  static Device& at(int index);

  explicit Device(int index);

  // Counts a call. Throws if the device is lost, the process forked, or a test wants the call to
  // fail. Returns true if the test wants the work of this call to fail when it runs.
  bool enter(Call call);

  StreamId create_stream();
  void* handle(StreamId stream);
  void submit(StreamId stream, Work work, bool fails = false);
  bool is_idle(StreamId stream);
  void synchronize(StreamId stream);
  void synchronize();

  std::shared_ptr<Recording> record(StreamId stream);
  void wait(StreamId stream, const std::shared_ptr<Recording>& recording);  // of any device
  bool is_done(const Recording& recording);
  void synchronize(const Recording& recording);

  // Drops `memory` once the stream has done what it has to do now. Never fails.
  void release(StreamId stream, const std::shared_ptr<void>& memory) noexcept;

  // For tests.
  void hold(StreamId stream, const std::shared_ptr<bool>& released);
  static void release_hold(const std::shared_ptr<bool>& released);
  void hold_copies(bool held);
  void let_copies(int64_t count);  // go on although copies are held
  void set_copy_delay(std::chrono::duration<double> delay);
  void fail(Call call, int64_t nth, int64_t times, bool when_it_runs);
  void lose(const std::string& message);
  std::string error();  // why the device was lost, although no test wanted that
  void forget_error();
  std::string pending();
  Counters counters();
  void count(const std::function<void(Counters&)>& add);
  static void reset();  // all devices are as in the beginning; live memory and events stay
  static void stop();   // ends all threads
  static bool is_forked();

  const int index;

 private:
  friend class Stream;

  struct Fault {
    int64_t skip = 0;  // calls until then
    int64_t times = 0;
    bool when_it_runs = false;
  };

  Stream& find(StreamId stream);
  void check() const;
  void queue(Stream& stream, Work work);
  void complete(const std::shared_ptr<Recording>& recording);
  void lose(const std::string& message, bool wanted);
  bool is_running() const;
  void wake();
  template <class Done>
  void wait_on_host(Lock& lock, Done done);

  std::map<StreamId, std::unique_ptr<Stream>> streams_;
  StreamId next_stream_ =
      1;  // never used again: a stream of an earlier test is not taken for another
  std::array<Fault, kCallNames.size()> faults_ = {};
  std::string lost_;  // why
  std::string error_;
  bool copies_held_ = false;
  int64_t copies_let_ = 0;
  std::chrono::duration<double> copy_delay_{0};
  Counters counters_ = {};
};

std::mutex& devices_lock();

}  // namespace fake_accelerator
