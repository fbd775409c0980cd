#pragma once

#include <memory>

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
// it is skipped while it is held, and evicted from there once it is idle. So the order does not
// depend on when copies end.
//
// To add a policy: derive from EvictionPolicy, add an EvictionPolicyKind, and extend make_policy()
// (eviction.cpp). Raise kMaxLists if it has more lists.
class EvictionPolicy {
 public:
  explicit EvictionPolicy(std::vector<Node>& nodes) : nodes_(nodes) {}
  virtual ~EvictionPolicy() = default;

  // Called when a key without a page is to be stored; then evict(), if no page is free, and
  // add_page().
  virtual Admission admit(const Key& key) = 0;
  // Returns an idle page, which then loses its key. There must be an idle page.
  virtual uint32_t evict(const Admission& admission) = 0;
  // The admitted key gets a page, which is held.
  virtual void add_page(const Admission& admission) = 0;
  // A page that is not idle loses its key.
  virtual void forget(uint32_t page) = 0;

  // A held page without a place was used.
  virtual void use(uint32_t page) = 0;
  // This many pages can be given to keys now. The number never falls.
  virtual void grow(size_t num_pages) = 0;

  // A page becomes idle. Without a place it gets the newest one.
  void add_idle(uint32_t page) {
    const uint8_t list = nodes_[page].list;
    nodes_[page].has_place ? restart(list) : place(page, kNone);
    ++num_idle_[list];
  }
  // An idle page is held from now on, and has no place.
  void remove_idle(uint32_t page) {
    unplace(page);
    --num_idle_[nodes_[page].list];
  }
  // An idle page is held from now on, and keeps its place.
  void suspend_idle(uint32_t page) { --num_idle_[nodes_[page].list]; }
  // Moves a page directly before another one of its list, or to the newest place if `newer` is
  // kNone.
  void place(uint32_t page, uint32_t newer) {
    unplace(page);
    List& list = lists_[nodes_[page].list];
    if (newer == kNone) {
      list.append(nodes_, page);
      if (start_[nodes_[page].list] == kNone) start_[nodes_[page].list] = page;
    } else {
      list.insert_before(nodes_, page, newer);
      restart(nodes_[page].list);
    }
    nodes_[page].has_place = true;
  }
  void unplace(uint32_t page) {
    if (!nodes_[page].has_place) return;
    uint32_t& start = start_[nodes_[page].list];
    if (start == page) start = nodes_[page].after;
    lists_[nodes_[page].list].remove(nodes_, page);
    nodes_[page].has_place = false;
  }
  // In all lists.
  size_t num_idle() const {
    size_t sum = 0;
    for (const size_t num_idle : num_idle_) sum += num_idle;
    return sum;
  }

 protected:
  // The idle page of a list that is evicted first. There must be one.
  uint32_t take_oldest_idle(uint8_t list) {
    uint32_t page = start_[list];
    while (nodes_[page].count > 0) page = nodes_[page].after;
    start_[list] = page;
    remove_idle(page);
    return page;
  }

  std::vector<Node>& nodes_;
  size_t num_idle_[kMaxLists] = {};  // in each list

 private:
  // A page before start_ may be idle.
  void restart(uint8_t list) { start_[list] = lists_[list].oldest(); }

  List lists_[kMaxLists];
  // In each list all pages before this one are held, so evictions skip them once; kNone: all are.
  uint32_t start_[kMaxLists] = {kNone, kNone};
};

enum class EvictionPolicyKind { kLru = 0, kArc = 1 };

// nodes: one for each page.
std::unique_ptr<EvictionPolicy> make_policy(EvictionPolicyKind kind, std::vector<Node>& nodes);

}  // namespace kvswap::prefix
