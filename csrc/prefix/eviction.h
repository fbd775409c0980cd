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
// evicted. Pages calls the policy and enters keys into the table; evict() and forget() take them
// out. Node p of the table is page p. A policy may use the nodes after those of the pages for
// itself.
//
// To add a policy: derive from EvictionPolicy, add an EvictionPolicyKind, and extend num_nodes()
// and make_policy() (eviction.cpp). Raise kMaxLists if it has more lists.
class EvictionPolicy {
 public:
  explicit EvictionPolicy(Table& table) : table_(table) {}
  virtual ~EvictionPolicy() = default;

  // Called when a key without a page is to be stored; then evict(), if no page is free, and
  // add_page().
  virtual Admission admit(const Key& key) = 0;
  // Takes the key of an idle page out of the table and returns the page. There must be an idle
  // page.
  virtual uint32_t evict(const Admission& admission) = 0;
  // The admitted key gets a page, which is held.
  virtual void add_page(const Admission& admission) = 0;
  // Takes the key of a page that is not idle out of the table.
  virtual void forget(uint32_t page) = 0;

  // A held page without a place was used.
  virtual void use(uint32_t page) = 0;
  // This many pages can be given to keys now. The number never falls.
  virtual void grow(size_t num_pages) = 0;

  // See EvictionOrder: in that of the page's list.
  void add_idle(uint32_t page) { order_of(page).add_idle(table_.nodes, page); }
  void remove_idle(uint32_t page) { order_of(page).remove_idle(table_.nodes, page); }
  void suspend_idle(uint32_t page) { order_of(page).suspend_idle(); }
  void place(uint32_t page, uint32_t newer) { order_of(page).place(table_.nodes, page, newer); }
  void unplace(uint32_t page) { order_of(page).unplace(table_.nodes, page); }
  // In all lists.
  size_t num_idle() const {
    size_t sum = 0;
    for (const EvictionOrder& order : orders_) sum += order.num_idle();
    return sum;
  }

 protected:
  Table& table_;
  EvictionOrder orders_[kMaxLists];  // of each list

 private:
  EvictionOrder& order_of(uint32_t page) { return orders_[table_.nodes[page].list]; }
};

enum class EvictionPolicyKind { kLru = 0, kArc = 1 };

// How many nodes the table of a policy with this many pages must have.
size_t num_nodes(EvictionPolicyKind kind, size_t num_pages);
std::unique_ptr<EvictionPolicy> make_policy(EvictionPolicyKind kind, Table& table,
                                            size_t num_pages);

}  // namespace kvswap::prefix
