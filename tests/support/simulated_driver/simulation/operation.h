#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "event.h"

namespace simulated {

// Two ends: the smaller device first, kHost for the host.
using Link = std::pair<int, int>;
constexpr int kHost = -1;

struct Copy {
  uint64_t dst, src;
  size_t bytes;
  std::vector<char> early;  // the source as it was in the call, where that is allowed

  void run() const;
};

// What a kernel does with one slot: encodes or decodes it.
struct Coding {
  std::function<void()> run;
  std::vector<std::pair<uint64_t, uint64_t>> memory;  // that it touches, as begin and end
};

// An entry of a stream's queue.
struct Operation {
  enum Kind { kCopy, kRecord, kWait, kWaitValue, kWriteValue, kHold };

  Kind kind = kCopy;
  std::vector<Copy> copies = {};             // kCopy
  std::vector<Coding> codings = {};          // kCopy
  std::shared_ptr<Record> record = nullptr;  // kRecord, kWait
  uint64_t address = 0, value = 0;           // kWaitValue, kWriteValue
  std::shared_ptr<bool> released = nullptr;  // kHold
  std::string name = {};
  std::optional<Link> link = {};  // that the bytes go over

  bool ready() const;
  bool touches(uint64_t begin, uint64_t end) const;
};

}  // namespace simulated
