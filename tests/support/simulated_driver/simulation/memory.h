#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace simulated {

struct Range {
  uint64_t begin = 0, end = 0;
  unsigned type = 0;  // 1 host, 2 device, 0 not known to the driver
  int device = -1;
  enum Origin { kAdopted, kAllocated, kRegistered } origin = kAdopted;
  uint64_t shift = 0;  // from an address of the process to that of the device
};

// The ranges that the driver knows. All of it is host memory.
class Memory {
 public:
  void add(const Range& range) {
    ranges_[range.begin] = range;
    let_go_.erase(range.begin);
  }
  void remove(uint64_t begin) {
    ranges_.erase(begin);
    let_go_.insert(begin);
  }
  // Nothing is there now, but was: who lets it go again could meet another owner's memory.
  bool was_let_go(uint64_t begin) const { return let_go_.count(begin) > 0; }
  void clear() { *this = {}; }

  Range find(uint64_t address) const {
    auto next = ranges_.upper_bound(address);
    const bool known = next != ranges_.begin() && address < std::prev(next)->second.end;
    return known ? std::prev(next)->second : Range{};
  }

  // A part of a reservation without memory behind it. A strided copy may not lie across it, even
  // though none of its rows is there (seen on an H200: CUDA_ERROR_INVALID_VALUE).
  void unmap(uint64_t begin, uint64_t bytes) { holes_.push_back({begin, begin + bytes}); }
  bool is_mapped(uint64_t begin, uint64_t end) const {
    for (const auto& hole : holes_) {
      if (hole.first < end && begin < hole.second) return false;
    }
    return true;
  }

  // Whether a copy may touch all of it: a registration has an end, also where another one follows.
  bool holds(uint64_t begin, uint64_t bytes) const {
    const Range range = find(begin);
    return range.origin != Range::kRegistered || begin + bytes <= range.end;
  }

  // Whether the driver takes a registration of so many bytes.
  bool takes(uint64_t bytes) const {
    uint64_t registered = bytes;
    for (const auto& [begin, range] : ranges_) {
      if (range.origin == Range::kRegistered) registered += range.end - begin;
    }
    return bytes <= most_in_one && registered <= most_in_all;
  }
  bool registers = true;
  uint64_t most_in_one = ~uint64_t{0}, most_in_all = ~uint64_t{0};

  int allocations() const {
    int count = 0;
    for (const auto& [begin, range] : ranges_) count += range.origin == Range::kAllocated;
    return count;
  }

  // What the device uses at other addresses than the process.
  std::vector<Range> elsewhere() const {
    std::vector<Range> found;
    for (const auto& [begin, range] : ranges_) {
      if (range.shift != 0) found.push_back(range);
    }
    return found;
  }

  // Whether the driver knows memory in these bytes, or has registered some of the pages of the
  // system that they touch.
  bool overlaps(uint64_t begin, uint64_t end) const {
    constexpr uint64_t kPage = 4096;
    for (const auto& [first, range] : ranges_) {
      if (range.origin == Range::kRegistered && first < (end + kPage - 1) / kPage * kPage &&
          begin / kPage * kPage < range.end) {
        return true;
      }
    }
    auto next = ranges_.lower_bound(begin);
    return find(begin).type != 0 || (next != ranges_.end() && next->first < end);
  }

 private:
  std::map<uint64_t, Range> ranges_;  // by first address
  std::set<uint64_t> let_go_;
  std::vector<std::pair<uint64_t, uint64_t>> holes_;
};

}  // namespace simulated
