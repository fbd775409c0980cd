#pragma once

#include <utility>

#include "prefix/table.h"

namespace kvswap::prefix {

// A linked list of nodes, oldest first. A node is in one list at most.
class List {
 public:
  uint32_t oldest() const { return oldest_; }
  size_t size() const { return size_; }

  void append(std::vector<Node>& nodes, uint32_t node) {
    nodes[node].before = newest_;
    nodes[node].after = kNone;
    (newest_ == kNone ? oldest_ : nodes[newest_].after) = node;
    newest_ = node;
    ++size_;
  }

  // Inserts a node directly before another one of this list.
  void insert_before(std::vector<Node>& nodes, uint32_t node, uint32_t newer) {
    const uint32_t older = nodes[newer].before;
    nodes[node].before = older;
    nodes[node].after = newer;
    (older == kNone ? oldest_ : nodes[older].after) = node;
    nodes[newer].before = node;
    ++size_;
  }

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
