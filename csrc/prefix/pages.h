#pragma once

#include <memory>
#include <vector>

#include "prefix/eviction.h"

namespace kvswap::prefix {

// Which filled pages are due to be written to a second tier: none, those that were used, or all.
enum class BelowPolicy { kNothing = 0, kReused = 1, kAll = 2 };

// The pages of one group, and the key on each. Not thread safe: the manager's lock guards it.
class Pages {
 public:
  // No page can be used before grow().
  Pages(size_t num_pages, EvictionPolicyKind kind, BelowPolicy below);

  // From now on the first `ready_pages` pages can be given to keys; never fewer than before. Visits
  // the new ones.
  void grow(size_t ready_pages);
  // For a reset, on a new object: takes over from `before` the number of usable pages, the counts
  // of evictions, and who holds which page, without the keys.
  void take_over(const Pages& before);

  // Finds the page of a key: node p is page p.
  const Table& table() const { return table_; }

  const Key& key(uint32_t page) const { return table_.nodes[page].key; }
  bool is_filled(uint32_t page) const {
    return page != kNone && table_.nodes[page].state == PageState::kFilled;
  }
  // Whether the page has its key's bytes and is not held: it can be evicted.
  bool is_idle(uint32_t page) const { return is_filled(page) && table_.nodes[page].count == 0; }

  // Pages that can be given to keys.
  size_t num_ready_pages() const { return num_ready_pages_; }
  size_t num_free() const { return free_.size(); }
  size_t num_idle() const { return policy_->num_idle(); }
  size_t num_filling() const { return num_filling_ + lent_.size(); }
  uint64_t num_evicted() const { return num_evicted_; }
  // Of these, pages that were due to be written below.
  uint64_t num_lost() const { return num_lost_; }

  // A held page is not given to another key. It must have one. Returns whether it keeps a place in
  // the order of eviction, which it got while it was held.
  bool hold(uint32_t page) {
    policy_->hold(page);
    return table_.nodes[page].has_place;
  }
  // It keeps its place in the order of eviction.
  void hold_in_place(uint32_t page) { policy_->hold_in_place(page); }
  void release(uint32_t page);
  // A filled page was used.
  void use(uint32_t page);
  // Sets the order of eviction: each of these pages before the page that precedes it in `pages`.
  // The first keeps its place, and gets the newest one if it has none. Each list of the policy is
  // ordered for itself. A held page is evicted from its place once it is idle, unless it is used
  // before.
  void order(const uint32_t* pages, size_t count);
  // A page gets the newest place.
  void renew(uint32_t page) { policy_->place(page, kNone); }

  // Gives a page to each of `count` keys at these indices, and holds it. The keys must be distinct
  // and have no page, and there must be enough free and idle pages. The pages ascend, so that
  // neighbours are copied together. Writes those whose blocks were evicted in the order of their
  // eviction, and returns how many they are. Allocates nothing, so it cannot fail halfway.
  size_t assign(const uint8_t* keys, const int64_t* key_indices, size_t count, int64_t* pages,
                int64_t* evicted);
  // Lends a page. There must be a free or idle one.
  uint32_t lend();
  // A lent page has the bytes of this key now. If the key is on another page, this one is free, and
  // false is returned.
  bool publish(uint32_t page, const Key& key);
  // A lent page is free.
  void take_back(uint32_t page);
  // Called when the page has its key's bytes. was_read: from the second tier. False if the key was
  // forgotten meanwhile.
  bool mark_filled(uint32_t page, bool was_read);
  bool was_read(uint32_t page) const { return (table_.nodes[page].below & kWasRead) != 0; }
  // Forgets the page's key.
  void forget(uint32_t page);

  // Takes up to `count` of the pages that have been due for longest, and holds them. They keep
  // their places in the order of eviction. Appends them to `pages`, which has the memory. Visits at
  // most `visits` pages.
  void hold_due(size_t count, size_t visits, std::vector<uint32_t>& pages);
  // A page of hold_due() was written, or not: then it is due again. It stays held.
  void end_write(uint32_t page, bool is_below);

 private:
  // Bits of Node::below. kDue: the page is to be written. kQueued: it is in due_. kIsBelow: it was
  // written, or hold_due() holds it for that. kWasRead: it was read from there.
  enum Below : uint8_t { kDue = 1, kQueued = 2, kIsBelow = 4, kWasRead = 8 };
  void make_due(uint32_t page);
  uint32_t evict(const Admission& admission);

  size_t num_ready_pages_ = 0;
  Table table_;
  List free_, lent_;
  std::unique_ptr<EvictionPolicy> policy_;
  std::vector<Admission> admissions_;  // used by assign(); has room for every page
  size_t num_filling_ = 0;
  uint64_t num_evicted_ = 0, num_lost_ = 0;
  const BelowPolicy below_;
  // A ring with room for every page, empty without a second tier. Each page is in it once at most,
  // also if it was evicted meanwhile.
  std::vector<uint32_t> due_;
  size_t first_due_ = 0, num_due_ = 0;
};

}  // namespace kvswap::prefix
