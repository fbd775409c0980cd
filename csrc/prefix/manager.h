#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
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
// one do not count: no load can use them. lease: a reservation of the pages that the prefix `ready`
// needs, on which no copy is made; 0: none.
struct Lookup {
  int64_t found, ready, pending, lease;
};

// Some of the keys of a request and their pages, of all groups in a row, and how many each group
// has. evicted: the pages among them whose blocks were evicted for it, in that order.
struct Assigned {
  std::vector<int64_t> key_indices, pages, counts, evicted;
};

struct Stored {
  int64_t reservation = 0;  // 0: there is nothing to store
  int64_t lease = 0;        // another reservation, which holds the pages of all keys; 0: none
};

// What prepare_store() is for. kPreempted: all keys are leased. kPromoted: the pages are filled
// with what the second tier has. The store threshold counts for kStored only.
enum class Purpose { kStored, kPreempted, kPromoted };

// Pages that are due to be written below, and their keys in a row.
struct Due {
  int64_t reservation = 0;  // 0: there are none
  uint64_t resets = 0;      // before they were stored
  std::vector<uint8_t> keys;
  std::vector<int64_t> pages;
};

// Blocks of a group since the start, except refused: stores for which there was no room. skipped:
// below the store threshold. failed: of loads and stores that failed. promoted: from the store
// below.
struct Counters {
  uint64_t asked, hits, pending, stored, loaded, skipped, refused, failed, promoted;
};

// Thrown by a call that may not wait and would take long. Nothing has changed.
struct Busy {};

// Knows which prefix block is on which host page. Thread safe.
//
// A reservation ends with end(), or by ended_pages(): whatever was pushed there ends when the next
// call has the lock.
//
// wait: false for a caller that holds Python's GIL. Such a call does not wait for another thread,
// and visits at most kFewKeys keys or held pages. Otherwise it throws Busy, and its caller releases
// the GIL and calls again. Releasing the GIL costs more than a small call: a thread that computes
// in Python gives it back only after milliseconds.
class BlockManager {
 public:
  // With a million pages, a call for this many keys takes less than a millisecond.
  static constexpr size_t kFewKeys = 1024;

  BlockManager(const std::vector<GroupOptions>& groups, const Options& options);
  ~BlockManager();

  const std::shared_ptr<EndedPages>& ended_pages() const { return ended_pages_; }
  // The group and key of pages that were found to be corrupted since the last call and came from
  // the second tier, which may have the same bytes. Pages that came from the GPU may have been
  // written there before the damage: whoever reads such a page finds out.
  std::vector<std::pair<uint32_t, Key>> take_corrupted();

  // From now on the first ready_pages[g] pages of group g can be used; never fewer than before. A
  // new manager has none.
  void grow(const int64_t* ready_pages);
  // again: a repeated lookup, which is not counted. hold: with a lease, whose pages keep their
  // places in the order of eviction.
  Lookup lookup(const GroupKeys* keys, bool again, bool hold, bool wait);
  // The longest prefix, in units, that somebody else can complete, who has the blocks behind the
  // first `found` units for which `there`, of each group, is not 0.
  int64_t longest_prefix(int64_t found, const std::vector<std::string>& there) const;
  // Holds the pages of the keys that are ready. all: or of none, if a key is not; this counts as a
  // use. Otherwise they keep their places in the order of eviction. Returns the reservation; 0 if
  // nothing is held.
  int64_t hold(const GroupKeys* keys, bool all, Assigned& held, bool wait);
  // Gives pages to the keys that are to be stored. Gives none and returns nullopt if there is no
  // room, or if there were other resets than `resets`.
  std::optional<Stored> prepare_store(const GroupKeys* keys, Purpose purpose,
                                      std::optional<uint64_t> resets, Assigned& assigned,
                                      bool wait);
  // Holds up to `count` pages of a group that are due to be written below, those that have been due
  // for longest. This does not count as a use, so the order of eviction is unchanged.
  Due hold_due(size_t count, size_t group, bool wait);
  // Ends a reservation, after the copy. If it has failed, the keys that were to be stored, or
  // loaded, are forgotten; otherwise those of the rejected pages.
  // Pages of hold_due() stay filled, and are then below or due again.
  void end(int64_t reservation, Outcome outcome, const RejectedPages& rejected, bool wait);
  // Lends `count` pages of the first group, or as many as there are, for blocks whose keys are not
  // known yet. They ascend. A reset does not end that.
  std::vector<int64_t> lend(size_t count, bool wait);
  // Lent pages, each named once, were filled with the blocks of these keys, which are ready. A page
  // whose key has another one is free, and so are all of them without keys: nullptr.
  void take_back(const std::vector<int64_t>& pages, const uint8_t* keys, bool wait);
  // Forgets the keys that a reservation of prepare_store() is to fill. It has its pages until
  // end().
  void abandon(int64_t reservation, bool wait);
  // Marks the blocks of the keys as used, the first block as the most recent.
  void touch(const GroupKeys* keys, bool wait);
  // Sets the order of eviction: in each group, later blocks of the keys before earlier ones. renew:
  // and all of them after the blocks of other keys. Does not count as a use. Pages that are held
  // take their place when they are released.
  void order(const GroupKeys* keys, bool renew, bool wait);
  // Forgets all keys. Pages of reservations stay held; other calls wait only while those are
  // marked.
  void reset();
  // How many resets there were. Takes no lock.
  uint64_t resets() const { return resets_; }
  // Of a group, in the order of the fields of torch_kvswap.prefix.BlockStats.
  std::vector<uint64_t> stats(size_t group);

 private:
  // What the copy of a reservation does with a page: nothing, load it, fill it from the GPU or from
  // below, or write it there.
  enum class Copy : uint8_t { kNone, kLoad, kStore, kPromotion, kWrite };
  // A page that a reservation holds.
  struct Pin {
    uint32_t group;
    uint32_t page;
    Copy copy;
  };
  // The pages of each reservation, in the order of the keys.
  using Reservations = std::unordered_map<int64_t, std::vector<Pin>>;
  struct Group {
    GroupOptions options;
    std::unique_ptr<Pages> pages;
    Counters counters;
    // Of the call that is running: the page of each key, or kNone. Kept for its memory.
    std::vector<uint32_t> found;
  };
  std::unique_ptr<Pages> make_pages(size_t group);
  // Throws if there is no such reservation.
  Reservations::iterator find(int64_t id);
  // Takes the lock, for a call that visits this many keys or pages, and ends what has ended.
  std::unique_lock<std::mutex> lock_for(size_t visits, bool wait);
  std::unique_lock<std::mutex> lock() { return lock_for(0, true); }
  void end_reported();
  // Throws only std::bad_alloc, with nothing changed.
  void end(Reservations::iterator of, Outcome outcome, const RejectedPages& rejected);
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
  bool find_wanted(const GroupKeys* keys, Purpose purpose, Assigned& wanted);
  void release_all(const std::vector<Pin>& pins);
  // The keys that a reservation copies. Its pages stay held.
  void forget_all(const std::vector<Pin>& pins);

  const std::shared_ptr<EndedPages> ended_pages_ = std::make_shared<EndedPages>();
  std::mutex mutex_;
  const EvictionPolicyKind policy_;
  const BelowPolicy below_;
  std::vector<Group> groups_;
  const uint32_t store_threshold_;
  std::optional<LookupCounter> lookups_;
  Reservations reservations_;
  ReservedPages* reported_ = nullptr;  // taken from ended_pages_
  std::vector<std::pair<uint32_t, Key>> corrupted_;
  std::atomic<uint64_t> resets_ = 0;
  std::vector<uint32_t> seen_;  // the hash table of check_distinct(), kept for its memory
};

}  // namespace kvswap::prefix
