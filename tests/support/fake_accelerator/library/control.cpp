// What tests call, through ctypes: fake_accelerator/accelerator.py. A call that can fail returns a
// negative number then, and accelerator_failure() says why.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "device.h"
#include "memory.h"
#include "torch_device.h"

using namespace fake_accelerator;

namespace {

thread_local std::string text;  // what was returned last

// By their numbers.
std::mutex holds_lock;
std::vector<std::shared_ptr<bool>> holds;

template <class Body>
int64_t attempt(Body body) {
  try {
    return body();
  } catch (const std::exception& error) {
    text = error.what();
    return -1;
  }
}

}  // namespace

extern "C" {

const char* accelerator_failure() { return text.c_str(); }

int64_t accelerator_hold(int device, StreamId stream) {
  return attempt([&] {
    auto released = std::make_shared<bool>(false);
    Device::at(device).hold(stream, released);
    std::lock_guard<std::mutex> lock(holds_lock);
    holds.push_back(std::move(released));
    return static_cast<int64_t>(holds.size()) - 1;
  });
}

void accelerator_release(int64_t hold) {
  std::lock_guard<std::mutex> lock(holds_lock);
  Device::release_hold(holds[hold]);
}

void accelerator_hold_copies(int device, bool held) { Device::at(device).hold_copies(held); }

void accelerator_let_copies(int device, int64_t count) { Device::at(device).let_copies(count); }

void accelerator_set_copy_delay(int device, double seconds) {
  Device::at(device).set_copy_delay(std::chrono::duration<double>(seconds));
}

int64_t accelerator_fail(int device, const char* call, int64_t nth, int64_t times,
                         bool when_it_runs) {
  return attempt([&]() -> int64_t {
    const auto found = std::find(kCallNames.begin(), kCallNames.end(), std::string(call));
    if (found == kCallNames.end()) {
      std::string text = std::string("there is no call ") + call + "; there are";
      for (const char* name : kCallNames) text += std::string(" ") + name;
      throw Failure(text);
    }
    Device::at(device).fail(static_cast<Call>(found - kCallNames.begin()), nth, times,
                            when_it_runs);
    return 0;
  });
}

void accelerator_lose(int device, const char* message) { Device::at(device).lose(message); }

const char* accelerator_error(int device) {
  text = Device::at(device).error();
  return text.c_str();
}

void accelerator_forget_error(int device) { Device::at(device).forget_error(); }

const char* accelerator_pending(int device) {
  text = Device::at(device).pending();
  return text.c_str();
}

void accelerator_counters(int device, Counters* counters) {
  *counters = Device::at(device).counters();
}

void accelerator_reset() {
  Device::reset();
  reset_current();
}

void accelerator_stop() { Device::stop(); }

bool accelerator_is_forked() { return Device::is_forked(); }

}  // extern "C"
