#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <queue>
#include <unordered_map>
#include <utility>
#include <vector>

#include "prefix/lookup_counter.h"
#include "prefix/pages.h"

namespace kvswap::prefix {

// A group of layers. A prefix is a number of units, and a unit is `ratio` blocks of this group. A
// hit needs the last `window` blocks before its end; 0: all blocks.
struct GroupOptions {
  size_t num_pages, ratio, window;
};

struct Options {
  PolicyKind policy;
  uint32_t store_threshold;
  size_t lookup_capacity;  // keys with a counter of lookups
  int32_t events;          // a bit for each kind
};

// The keys of a request: those of the first group one after another, then those of the next.
struct Keys {
  const uint8_t* digests;
  const int64_t* counts;  // one for each group
};

// found: units of prefix that are cached. ready: units whose needed blocks are all ready. pending:
// blocks that `found` needs and that are not ready yet.
struct Found {
  int64_t found, ready, pending;
};

struct Stored {
  int64_t job = 0;    // 0: there is nothing to store
  int64_t lease = 0;  // of all the keys
};

struct Counters {
  uint64_t asked, hits, pending, stored, loaded, skipped, refused, failed;
};

// Thrown by a call that may not wait and would take long. Nothing has changed.
struct Busy {};

// Knows which prefix block is on which host page. Thread safe.
//
// wait: false for a caller that holds Python's GIL. Such a call does not wait for another thread,
// and visits at most kFewKeys keys or held pages. Otherwise it throws Busy, and its caller releases
// the GIL and calls again. Releasing the GIL costs more than a small call: a thread that computes
// in Python gives it back only after milliseconds.
class Manager {
 public:
  // With a million pages, a call for this many keys takes less than a millisecond.
  static constexpr size_t kFewKeys = 1024;

  Manager(const std::vector<GroupOptions>& groups, const Options& options);

  // From now on the first ready_pages[g] pages of group g can be used; never fewer than before. A
  // new manager has none.
  void grow(const int64_t* ready_pages);
  // again: a repeated lookup, which is not counted.
  Found lookup(const Keys& keys, bool again, bool wait);
  // Holds the pages of all keys for a job. Returns the job; 0 if some key is not ready.
  int64_t prepare_load(const Keys& keys, int64_t* pages, bool wait);
  // Gives pages to the keys that are to be stored. Writes the indices of those keys, their pages,
  // and how many there are in each group. Changes nothing, and returns nullopt, if there is no
  // room. keep: all keys are stored, and leased without an end.
  std::optional<Stored> prepare_store(const Keys& keys, double now, bool keep, int64_t* key_indices,
                                      int64_t* pages, int64_t* counts, bool wait);
  // Ends a job. Without success, the keys that it was to store, or load, are forgotten.
  void end(int64_t job, bool succeeded, bool wait);
  // Marks the blocks of the keys as used, the first block as the most recent.
  void touch(const Keys& keys, bool wait);
  // In each group, later blocks of the keys are evicted before earlier ones. renew: and all of them
  // after the blocks of other keys, without counting as a use.
  void order(const Keys& keys, bool renew, bool wait);
  // Holds the pages of all keys for some seconds. Returns the lease; 0 if some key is not cached.
  int64_t lease(const Keys& keys, double now, double seconds, bool wait);
  // Ends a lease. False if it has ended before.
  bool release(int64_t lease, bool wait);
  // Forgets all keys. Other calls wait only while the pages of running jobs are marked.
  void reset();
  size_t take_events(Event* events, size_t capacity);

  // Calls read(counters, pages) of a group.
  void stats(size_t group, double now,
             const std::function<void(const Counters&, const Pages&)>& read);

 private:
  struct Pin {
    uint32_t group;
    uint32_t page;
    bool fills;
  };
  struct Job {
    bool is_store;
    std::vector<Pin> pins;  // in the order of the keys
  };
  struct Group {
    GroupOptions options;
    std::unique_ptr<Pages> pages;
    Counters counters;
    std::vector<uint32_t> wanted;  // indices of the keys that are to be stored
  };
  std::unique_ptr<Pages> make_pages(size_t group);
  // Takes the lock, for a call that visits this many keys or pages.
  std::unique_lock<std::mutex> enter(size_t visits, bool wait);
  size_t total(const Keys& keys) const;
  // Sets `found_`, the page of each key; kNone after the first miss of a group without a window.
  // all: also after a miss.
  void find(const Keys& keys, bool all);
  // The longest prefix, in units, with all blocks that it needs cached, or ready.
  int64_t longest(const Keys& keys, bool ready) const;
  // The blocks of a group, from the first to the end, that a prefix needs.
  std::pair<size_t, size_t> needed(const Group& group, int64_t units) const;
  void check_distinct(const Keys& keys);
  // Sets `wanted` of each group. Whether there are pages for all of them.
  bool has_room(const Keys& keys, bool keep);
  // Holds the pages that a group's keys have, gives pages to `wanted`, and adds pins for all of
  // them.
  void take_pages(uint32_t group, const uint8_t* digests, uint32_t* found, int64_t count,
                  std::vector<Pin>& pins);
  void release_all(const std::vector<Pin>& pins);
  void expire(double now, bool wait);

  std::mutex mutex_;
  Events events_;
  const PolicyKind policy_;
  std::vector<Group> groups_;
  const uint32_t store_threshold_;
  std::optional<LookupCounter> lookups_;
  std::unordered_map<int64_t, Job> jobs_;
  std::unordered_map<int64_t, std::vector<Pin>> leases_;
  using End = std::pair<double, int64_t>;
  std::priority_queue<End, std::vector<End>, std::greater<End>> ends_;
  // Of the call that is running.
  std::vector<uint32_t> found_;
  std::vector<uint32_t> placed_, seen_;
};

}  // namespace kvswap::prefix
