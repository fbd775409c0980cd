#pragma once

#include "prefix/list.h"

namespace kvswap::prefix {

// Counts how often each key was looked up. Keeps only the `capacity` keys that were looked up last.
class LookupCounter {
 public:
  explicit LookupCounter(size_t capacity) : table_(capacity) {
    for (size_t i = 0; i < capacity; ++i) free_.append(table_.nodes, static_cast<uint32_t>(i));
  }

  void add(const Key& key) {
    uint32_t node = table_.find(key);
    if (node != kNone) {
      known_.remove(table_.nodes, node);
    } else {
      node = free_.size() > 0 ? free_.take_oldest(table_.nodes) : forget_oldest();
      table_.insert(node, key);
      table_.nodes[node].count = 0;
    }
    uint32_t& count = table_.nodes[node].count;
    if (count < UINT32_MAX) ++count;
    known_.append(table_.nodes, node);
  }

  uint32_t count(const Key& key) const {
    const uint32_t node = table_.find(key);
    return node == kNone ? 0 : table_.nodes[node].count;
  }

 private:
  uint32_t forget_oldest() {
    const uint32_t node = known_.take_oldest(table_.nodes);
    table_.erase(node);
    return node;
  }

  Table table_;
  List known_, free_;
};

}  // namespace kvswap::prefix
