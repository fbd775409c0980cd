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

// The order in which idle pages are evicted. A held page can have a place in it: it is skipped
// while it is held, and evicted from there once it is idle. So the order does not depend on when
// copies end.
class EvictionOrder {
 public:
  size_t num_idle() const { return num_idle_; }

  // A page becomes idle. Without a place it gets the newest one.
  void add_idle(std::vector<Node>& nodes, uint32_t page) {
    if (!nodes[page].has_place) place(nodes, page, kNone);
    ++num_idle_;
  }

  // An idle page is held from now on, and has no place.
  void remove_idle(std::vector<Node>& nodes, uint32_t page) {
    unplace(nodes, page);
    --num_idle_;
  }

  // An idle page is held from now on, and keeps its place.
  void suspend_idle() { --num_idle_; }

  // Moves a page directly before another one, or to the newest place if `newer` is kNone.
  void place(std::vector<Node>& nodes, uint32_t page, uint32_t newer) {
    unplace(nodes, page);
    if (newer == kNone) {
      list_.append(nodes, page);
    } else {
      list_.insert_before(nodes, page, newer);
    }
    nodes[page].has_place = true;
  }

  void unplace(std::vector<Node>& nodes, uint32_t page) {
    if (nodes[page].has_place) list_.remove(nodes, page);
    nodes[page].has_place = false;
  }

  // There must be an idle page.
  uint32_t take_oldest(std::vector<Node>& nodes) {
    uint32_t page = list_.oldest();
    while (nodes[page].count > 0) page = nodes[page].after;
    remove_idle(nodes, page);
    return page;
  }

 private:
  List list_;
  size_t num_idle_ = 0;
};

}  // namespace kvswap::prefix
