#pragma once

#include <memory>

#include "prefix/list.h"

namespace kvswap::prefix {

constexpr size_t kMaxLists = 2;  // of pages in a policy

// How a key is admitted: the list for its page, and what the policy needs to know when it makes
// room.
struct Admission {
  uint8_t list = 0;
  bool was_frequent = false;  // before it was evicted
  bool leaves_no_ghost = false;
};

// Decides which page is evicted. A page with a key is held or idle, and only an idle page can be
// evicted. Node p of the table is page p.
class Policy {
 public:
  virtual ~Policy() = default;

  // A key without a page is to be stored. To be followed by evict(), if no page is free, and
  // enter().
  virtual Admission admit(const Digest& key) = 0;
  // Evicts the key of an idle page; there is one. Returns the page.
  virtual uint32_t evict(const Admission& admission) = 0;
  // The key has a page, which is held.
  virtual void enter(const Admission& admission) = 0;
  // The key of a held page is forgotten.
  virtual void leave(uint32_t page) = 0;

  // A page becomes idle, as the newest one; or it is held from now on.
  virtual void add_idle(uint32_t page) = 0;
  virtual void remove_idle(uint32_t page) = 0;
  // Moves an idle page directly before another one of the same list.
  virtual void move_idle(uint32_t page, uint32_t newer) = 0;
  virtual size_t num_idle() const = 0;

  // A held page was used.
  virtual void use(uint32_t page) = 0;
  // This many pages can be given to keys now; never fewer than before.
  virtual void grow(size_t num_pages) = 0;
};

enum class PolicyKind { kLru = 0, kArc = 1 };

// Nodes that a policy needs in its table for this many pages.
size_t num_nodes(PolicyKind kind, size_t num_pages);
std::unique_ptr<Policy> make_policy(PolicyKind kind, Table& table, size_t num_pages);

}  // namespace kvswap::prefix
