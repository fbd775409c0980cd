#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "prefix/lookup_counter.h"
#include "prefix/pages.h"
#include "prefix/reserved_pages.h"

namespace kvswap::prefix {

// A group of layers that share their blocks. The length of a prefix is counted in units; one unit
// is `ratio` blocks of this group. A hit needs the last `window` blocks before its end; 0: all
// blocks.
struct GroupOptions {
  size_t num_pages, ratio, window;
};

struct Options {
  EvictionPolicyKind policy;
  uint32_t store_threshold;
  BelowPolicy below;
};

// The keys of a request in one group, kKeyBytes each, in a row. A call gets an array with an item
// for each group.
struct GroupKeys {
  const uint8_t* bytes;
  size_t count;
};

// found: length of the longest cached prefix, in units. ready: length of the longest prefix that
// can be loaded now, in units. pending: blocks, not units, of the keys that have a page but are not
// ready, also those behind `found`. In a group that needs all blocks, keys behind the first missing
// one do not count: no load can use them.
struct Lookup {
  int64_t found, ready, pending;
};

// Some of the keys of a request and their pages, of all groups in a row, and how many each group
// has. evicted: the pages among them whose blocks were evicted for it, in that order.
struct Assigned {
  std::vector<int64_t> key_indices, pages, counts, evicted;
};

// Pages that are due to be written below, and their keys in a row.
struct Due {
  uint64_t resets = 0;  // before they were stored
  std::vector<uint8_t> keys;
  std::vector<int64_t> pages;
};

// Blocks of a group since the start, except refused: stores for which there was no room. skipped:
// below the store threshold. failed: of loads and stores that failed. promoted: from the store
// below.
struct Counters {
  uint64_t asked, hits, pending, stored, loaded, skipped, refused, failed, promoted;
};

// Knows which prefix block is on which host page. The caller of a method has the lock, if its
// comment does not say otherwise.
//
// A method that makes a reservation gets it from its caller, so that a failed allocation changes
// nothing. If it makes none, the reservation stays without an id. A reservation ends by
// ended_pages(): whatever was pushed there ends when somebody gets the lock.
class BlockManager {
 public:
  // With a million pages, a call for this many keys takes less than a millisecond.
  static constexpr size_t kFewKeys = 1024;
  using Lock = std::unique_lock<std::mutex>;

  BlockManager(const std::vector<GroupOptions>& groups, const Options& options);
  ~BlockManager();

  // Without the lock.
  const std::shared_ptr<EndedPages>& ended_pages() const { return ended_pages_; }

  // Waits for the lock, and ends what has ended. Throws only std::bad_alloc.
  Lock lock();
  // For a call that visits this many keys or pages, by a thread that holds Python's GIL. Does not
  // lock if that takes long, or another thread has the lock: then the caller releases the GIL. That
  // costs more than a small call: a thread that computes in Python gives it back only after
  // milliseconds.
  Lock try_lock(size_t visits);

  // The group and key of pages that were found to be corrupted since the last call and came from
  // the second tier, which may have the same bytes. Pages that came from the GPU may have been
  // written there before the damage: whoever reads such a page finds out.
  std::vector<std::pair<uint32_t, Key>> take_corrupted();

  // From now on the first ready_pages[g] pages of group g can be used; never fewer than before. A
  // new manager has none.
  void grow(const int64_t* ready_pages);
  // again: a repeated lookup, which is not counted. lease: if it is not null, a reservation of the
  // pages that the prefix `ready` needs, which keep their places in the order of eviction. There is
  // none if nothing is ready.
  Lookup lookup(const GroupKeys* keys, bool again, ReservedPages* lease);
  // Without the lock. The longest prefix, in units, that somebody else can complete, who has the
  // blocks behind the first `found` units for which `there`, of each group, is not 0.
  int64_t longest_prefix(int64_t found, const std::vector<std::string>& there) const;
  // Holds the pages of the keys that are ready. all: or of none, if a key is not; this counts as a
  // use. Otherwise they keep their places in the order of eviction.
  void hold(const GroupKeys* keys, bool all, Assigned& held, ReservedPages& made);
  // Gives pages to the keys that are to be stored, if there are any. lease: if it is not null, a
  // reservation of the pages of all keys. promoted_after: the pages are filled with what the second
  // tier has, which was asked after this many resets. With either of them the store threshold does
  // not count. Gives none and returns false if there is no room, or if there were more resets.
  bool prepare_store(const GroupKeys* keys, std::optional<uint64_t> promoted_after,
                     Assigned& assigned, ReservedPages& made, ReservedPages* lease);
  // Holds up to `count` pages of a group that are due to be written below, those that have been due
  // for longest, and visits kFewKeys at most. This does not count as a use, so the order of
  // eviction is unchanged.
  Due hold_due(size_t count, size_t group, ReservedPages& made);
  // Ends a reservation, after the copy. If it has failed, the keys that were to be stored, or
  // loaded, are forgotten; otherwise those of the rejected pages. Pages of hold_due() stay filled,
  // and are then below or due again. Throws only std::bad_alloc, with nothing changed.
  void end(ReservedPages& reservation);
  // Lends `count` pages of the first group, or as many as there are, for blocks whose keys are not
  // known yet. They ascend. A reset does not end that.
  std::vector<int64_t> lend(size_t count);
  // Lent pages, each named once, were filled with the blocks of these keys, which are ready. A page
  // whose key has another one is free, and so are all of them without keys: nullptr.
  void take_back(const std::vector<int64_t>& pages, const uint8_t* keys);
  // Forgets the keys that a reservation of prepare_store() is to fill. It has its pages until its
  // end.
  void abandon(ReservedPages& reservation);
  // Marks the blocks of the keys as used, the first block as the most recent.
  void touch(const GroupKeys* keys);
  // Sets the order of eviction: in each group, later blocks of the keys before earlier ones. renew:
  // and all of them after the blocks of other keys. Does not count as a use. Pages that are held
  // take their place when they are released.
  void order(const GroupKeys* keys, bool renew);
  // Without the lock. Forgets all keys. Pages that are held stay so; other calls wait while they
  // are looked for, some milliseconds for a million pages.
  void reset();
  // Without the lock. How many resets there were.
  uint64_t resets() const { return resets_; }
  // Of a group, in the order of the fields of torch_kvswap.prefix.BlockStats.
  std::vector<uint64_t> stats(size_t group) const;

 private:
  struct Group {
    GroupOptions options;
    std::unique_ptr<Pages> pages;
    Counters counters;
    // Of the call that is running: the page of each key, or kNone. Kept for its memory.
    std::vector<uint32_t> found;
  };
  std::unique_ptr<Pages> make_pages(size_t group);
  void end_reported();
  size_t num_keys(const GroupKeys* keys) const;
  // Sets `found` of each group. all: of every key; otherwise, in groups without a window, keys
  // after the first miss may be left at kNone.
  void find_pages(const GroupKeys* keys, bool all);
  // The longest prefix, in units, whose needed blocks are all present. ends: how many blocks there
  // are of each group; changed on the way.
  template <class IsPresent>
  int64_t longest_prefix(std::vector<size_t> ends, const IsPresent& is_present) const;
  // The range [first, end) of a group's blocks that a prefix of this length needs.
  std::pair<size_t, size_t> needed_blocks(const Group& group, int64_t units) const;
  // Throws if a group's keys contain one key twice.
  void check_distinct(const GroupKeys* keys);
  // Sets the key_indices and counts of `wanted` to the keys that are to be stored, and counts those
  // below the store threshold. Returns whether there are pages for all that are wanted.
  bool find_wanted(const GroupKeys* keys, bool may_skip, Assigned& wanted);
  void release_all(const std::vector<Pin>& pins);
  // The copy of the page has failed.
  void forget(Pin& pin);

  const std::shared_ptr<EndedPages> ended_pages_ = std::make_shared<EndedPages>();
  std::mutex mutex_;
  const EvictionPolicyKind policy_;
  const BelowPolicy below_;
  std::vector<Group> groups_;
  const uint32_t store_threshold_;
  std::optional<LookupCounter> lookups_;
  ReservedPages* reported_ = nullptr;  // taken from ended_pages_
  std::vector<std::pair<uint32_t, Key>> corrupted_;
  std::atomic<uint64_t> resets_ = 0;
  std::vector<uint32_t> seen_;  // the hash table of check_distinct(), kept for its memory
};

}  // namespace kvswap::prefix
