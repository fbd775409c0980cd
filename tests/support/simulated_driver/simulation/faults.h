#pragma once

#include <limits>
#include <map>
#include <string>

#include "result.h"

namespace simulated {

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
  void limit_allocations(size_t bytes) { largest_allocation_ = bytes; }
  void lose(int code) { lost_ = code; }
  int lost() const { return lost_; }
  int calls(const std::string& name) { return calls_[name]; }
  // Of the calling thread, since it began.
  int calls_here(const std::string& name) { return here()[name]; }

  // What the call that begins has to return, or success.
  int next(const std::string& name) {
    const int number = ++calls_[name];
    ++here()[name];
    if (lost_ && !works_on_a_lost_device(name)) return lost_;
    const auto& planned = planned_[name];
    const auto found = planned.find(number);
    return found == planned.end() ? kSuccess : found->second;
  }

  bool has_memory(size_t bytes) const { return bytes <= largest_allocation_; }
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

  std::map<std::string, int> calls_;
  std::map<std::string, std::map<int, int>> planned_;  // number of the call to what it returns
  int copies_left_ = -1, lost_ = kSuccess;
  size_t largest_allocation_ = std::numeric_limits<size_t>::max();
};

}  // namespace simulated
