#pragma once

#include "prefix/list.h"

namespace kvswap::prefix {

constexpr size_t kMaxLists = 2;  // in a policy; Node::list is less than this

// What a policy decides about a new key: the list that its page will be in, and notes for its own
// evict().
struct Admission {
  uint8_t list = 0;
  bool was_frequent = false;     // Arc: its ghost was on the frequent side
  bool leaves_no_ghost = false;  // Arc: no room to remember the key that is evicted for it
};

// Decides which page is evicted. A page with a key is held or idle, and only an idle page can be
// evicted. Node p is page p, and Node::list says in which list of the policy it is.
//
// A list has its pages in the order in which they are evicted. A held page can have a place there:
// it is passed while it is held, and evicted from there once it is idle. So the order does not
// depend on when copies end.
//
// To add a policy: derive from EvictionPolicy, add an EvictionPolicyKind, and extend make_policy()
// (pages.cpp). Raise kMaxLists if it has more lists.
class EvictionPolicy {
 public:
  // list_of_used: of a page that was used.
  EvictionPolicy(std::vector<Node>& nodes, uint8_t list_of_used)
      : nodes_(nodes), list_of_used_(list_of_used) {}
  virtual ~EvictionPolicy() = default;

  // Called when a key without a page is to be stored; then evict(), if no page is free, and
  // add_page().
  virtual Admission admit(const Key& key) = 0;
  // Returns an idle page, which then loses its key. There must be an idle page.
  virtual uint32_t evict(const Admission& admission) = 0;

  // This many pages can be given to keys now. The number never falls.
  void grow(size_t num_pages) { num_pages_ = num_pages; }
  // In all lists.
  size_t num_idle() const {
    size_t sum = 0;
    for (const size_t num_idle : num_idle_) sum += num_idle;
    return sum;
  }

  // The admitted key gets a page, which is held.
  void add_page(const Admission& admission) { ++sizes_[admission.list]; }
  // A page loses its key.
  void forget(uint32_t page) {
    unplace(page);
    num_idle_[nodes_[page].list] -= nodes_[page].count == 0;
    --sizes_[nodes_[page].list];
  }

  // The page loses its place, unless it got this while it was held.
  void hold(uint32_t page) {
    if (!nodes_[page].was_placed_held) unplace(page);
    hold_in_place(page);
  }
  void hold_in_place(uint32_t page) { num_idle_[nodes_[page].list] -= nodes_[page].count++ == 0; }
  // If the page is idle now and has no place, it gets the newest one.
  void release(uint32_t page) {
    Node& node = nodes_[page];
    if (--node.count > 0) return;
    ++num_idle_[node.list];
    if (!node.has_place) return insert(page, kNone);
    if (node.was_passed) start_[node.list] = lists_[node.list].oldest();
    node.was_placed_held = node.was_passed = false;
  }
  // A held page was used. It loses its place.
  void use(uint32_t page) {
    unplace(page);
    uint8_t& list = nodes_[page].list;
    --sizes_[list];
    list = list_of_used_;
    ++sizes_[list];
  }
  // Moves a page directly before one of its list, or to the newest place if `newer` is kNone.
  void place(uint32_t page, uint32_t newer) {
    unplace(page);
    insert(page, newer);
  }

 protected:
  // The idle page of a list that is evicted first. There must be one.
  uint32_t take_oldest_idle(uint8_t list) {
    uint32_t& start = start_[list];
    for (; nodes_[start].count > 0; start = nodes_[start].after) {
      nodes_[start].was_passed = true;
    }
    const uint32_t page = start;
    unplace(page);
    --num_idle_[list];
    --sizes_[list];
    return page;
  }

  std::vector<Node>& nodes_;
  size_t num_pages_ = 0;             // that can be given to keys
  size_t sizes_[kMaxLists] = {};     // pages with keys in each list
  size_t num_idle_[kMaxLists] = {};  // of these

 private:
  void insert(uint32_t page, uint32_t newer) {
    Node& node = nodes_[page];
    uint32_t& start = start_[node.list];
    node.has_place = true;
    node.was_placed_held = node.count > 0;
    node.was_passed = newer != kNone && nodes_[newer].was_passed;
    lists_[node.list].insert(nodes_, page, newer);
    if (start == newer) start = page;
    if (node.was_passed) start = lists_[node.list].oldest();
  }
  void unplace(uint32_t page) {
    Node& node = nodes_[page];
    if (!node.has_place) return;
    uint32_t& start = start_[node.list];
    if (start == page) start = node.after;
    lists_[node.list].remove(nodes_, page);
    node.has_place = node.was_placed_held = node.was_passed = false;
  }

  const uint8_t list_of_used_;
  List lists_[kMaxLists];
  // In each list all pages before this one are held, and marked was_passed; kNone: all of the list.
  // Evictions begin here. They begin at the oldest page again only if one that they have passed is
  // released, or if another is placed before it.
  uint32_t start_[kMaxLists] = {kNone, kNone};
};

enum class EvictionPolicyKind { kLru = 0, kArc = 1 };

}  // namespace kvswap::prefix
