#pragma once

#include <utility>

#include "prefix/table.h"

namespace kvswap::prefix {

// A linked list of nodes, oldest first. A node is in one list at most.
class List {
 public:
  uint32_t oldest() const { return oldest_; }
  size_t size() const { return size_; }

  // Inserts a node directly before another one of this list; as the newest if `newer` is kNone.
  void insert(std::vector<Node>& nodes, uint32_t node, uint32_t newer) {
    const uint32_t older = newer == kNone ? newest_ : nodes[newer].before;
    nodes[node].before = older;
    nodes[node].after = newer;
    (older == kNone ? oldest_ : nodes[older].after) = node;
    (newer == kNone ? newest_ : nodes[newer].before) = node;
    ++size_;
  }
  void append(std::vector<Node>& nodes, uint32_t node) { insert(nodes, node, kNone); }

  void remove(std::vector<Node>& nodes, uint32_t node) {
    const auto [before, after] = std::pair(nodes[node].before, nodes[node].after);
    (before == kNone ? oldest_ : nodes[before].after) = after;
    (after == kNone ? newest_ : nodes[after].before) = before;
    --size_;
  }

  uint32_t take_oldest(std::vector<Node>& nodes) {
    const uint32_t node = oldest_;
    remove(nodes, node);
    return node;
  }

 private:
  uint32_t oldest_ = kNone, newest_ = kNone;
  size_t size_ = 0;
};

}  // namespace kvswap::prefix
