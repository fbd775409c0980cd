#pragma once

#include <limits>
#include <map>
#include <set>
#include <string>

#include "result.h"

namespace simulated {

constexpr int kAll = -1;  // devices

// What the tests want to go wrong, and how often each function was called.
class Faults {
 public:
  // Returns the number of the call that will fail, as calls() counts.
  int fail(const std::string& name, int nth, int code) {
    const int number = calls_[name] + nth;
    planned_[name][number] = code;
    return number;
  }
  void fail_copy(int index) { copies_left_ = index; }
  // Of a GPU, or of all.
  void limit_allocations(size_t bytes, int device) { largest_allocation_[device] = bytes; }
  void lose(int code, int device) { lost_[device] = code; }
  int lost(int device) const { return of(lost_, device, kSuccess); }
  int calls(const std::string& name) { return calls_[name]; }
  // Of the calling thread, since it began.
  int calls_here(const std::string& name) { return here()[name]; }

  // What the call that begins has to return, or success. device: whose context is current.
  int next(const std::string& name, int device) {
    const int number = ++calls_[name];
    ++here()[name];
    if (lost(kAll) && !works_on_a_lost_device(name)) return lost(kAll);
    if (lost(device) && !works_beside_a_lost_device(name)) return lost(device);
    const auto& planned = planned_[name];
    const auto found = planned.find(number);
    return found == planned.end() ? kSuccess : found->second;
  }

  bool has_memory(size_t bytes, int device) const {
    return bytes <= of(largest_allocation_, device, std::numeric_limits<size_t>::max());
  }
  bool copy_fails() { return copies_left_ >= 0 && copies_left_-- == 0; }

 private:
  static std::map<std::string, int>& here() {
    static thread_local std::map<std::string, int> calls;
    return calls;
  }

  static bool works_on_a_lost_device(const std::string& name) {
    return name == "cuEventDestroy" || name == "cuStreamDestroy" || name == "cuGetErrorName" ||
           name == "cuGetErrorString";
  }

  // What concerns the thread or the machine, and finds a stream or an event by itself: whether that
  // is lost is asked then.
  static bool works_beside_a_lost_device(const std::string& name) {
    static const std::set<std::string> names = {
        "cuCtxPushCurrent",      "cuCtxPopCurrent",   "cuThreadExchangeStreamCaptureMode",
        "cuDriverGetVersion",    "cuStreamQuery",     "cuDevicePrimaryCtxRetain",
        "cuDeviceGetAttribute",  "cuEventQuery",      "cuPointerGetAttributes",
        "cuDeviceCanAccessPeer", "cuStreamWaitEvent",
    };
    return works_on_a_lost_device(name) || names.count(name) > 0;
  }

  template <typename Value>
  static Value of(const std::map<int, Value>& values, int device, Value otherwise) {
    for (const int key : {kAll, device}) {
      if (const auto found = values.find(key); found != values.end()) return found->second;
    }
    return otherwise;
  }

  std::map<std::string, int> calls_;
  std::map<std::string, std::map<int, int>> planned_;  // number of the call to what it returns
  std::map<int, int> lost_;                            // by GPU, as the next
  std::map<int, size_t> largest_allocation_;
  int copies_left_ = -1;
};

}  // namespace simulated
