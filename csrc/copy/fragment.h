#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvswap {

// A contiguous copy, maybe of several neighbours that were merged.
struct Fragment {
  uint64_t src;
  uint64_t dst;
  uint64_t bytes;
  int64_t index;  // in the caller's list, of the first neighbour; for errors
  bool src_on_host;
};

// The fragments of one call, neighbours (contiguous on both sides) merged as they come.
class FragmentList {
 public:
  explicit FragmentList(size_t expected = 0) { items_.reserve(expected); }

  // merge: the fragment is in the same allocation as the one before it, on both sides. A copy must
  // not run from one allocation into the next.
  void add(const Fragment& fragment, bool merge) {
    if (merge && !items_.empty()) {
      Fragment& last = items_.back();
      if (last.src + last.bytes == fragment.src && last.dst + last.bytes == fragment.dst) {
        last.bytes += fragment.bytes;
        return;
      }
    }
    items_.push_back(fragment);
  }

  bool empty() const { return items_.empty(); }
  const std::vector<Fragment>& items() const { return items_; }

 private:
  std::vector<Fragment> items_;
};

}  // namespace kvswap
