#pragma once

#include <memory>

#include "prefix/list.h"

namespace kvswap::prefix {

constexpr size_t kMostLists = 2;  // that a policy keeps pages in

// How a key comes in: which list its page will be in, and what the policy has to remember until it
// has made room for it.
struct Admission {
  uint8_t list = 0;
  bool was_frequent = false;  // and forgotten
  bool leaves_no_ghost = false;
};

// Decides which page has to go. A page with a key is idle, when nobody holds it, or held; only idle
// ones can go. Node p of the table is page p.
class Policy {
 public:
  virtual ~Policy() = default;

  // A key that no page has is to be stored. Then, if there is no free page, evict(), then enter().
  virtual Admission admit(const Digest& key) = 0;
  // Takes the key off an idle page, of which there is one, and returns the page.
  virtual uint32_t evict(const Admission& admission) = 0;
  // The key has a page, which is held.
  virtual void enter(const Admission& admission) = 0;
  // The key of a held page is forgotten.
  virtual void leave(uint32_t page) = 0;

  // A page is held no longer, and is the newest now; or is held from now on.
  virtual void add_idle(uint32_t page) = 0;
  virtual void remove_idle(uint32_t page) = 0;
  // An idle page goes directly before another one of the same list from now on.
  virtual void move_idle(uint32_t page, uint32_t newer) = 0;
  virtual size_t num_idle() const = 0;

  // A held page was asked for once more.
  virtual void use(uint32_t page) = 0;
  // So many pages can be given to keys now, never fewer than before.
  virtual void grow(size_t num_pages) = 0;
};

enum class PolicyKind { kLru = 0, kArc = 1 };

// Nodes that a policy needs in its table, for so many pages at most.
size_t num_nodes(PolicyKind kind, size_t num_pages);
std::unique_ptr<Policy> make_policy(PolicyKind kind, Table& table, size_t num_pages);

}  // namespace kvswap::prefix
