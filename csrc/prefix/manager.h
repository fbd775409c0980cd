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

// A group of layers. A prefix ends at a multiple of some number of tokens, which is `ratio` blocks
// of this group; to go on behind it, the last `window` blocks before it are needed, 0: all.
struct GroupOptions {
  size_t num_pages, ratio, window;
};

struct Options {
  PolicyKind policy;
  uint32_t store_threshold;
  size_t asked_capacity;  // keys whose number of lookups is remembered
  int32_t events;         // a bit for each kind
};

// The keys of a request: those of the first group one after another, then those of the next.
struct Keys {
  const uint8_t* digests;
  const int64_t* counts;  // one for each group
};

// Units of prefix: cached, and cached with all that is needed ready; blocks of the former that are
// not ready yet.
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

// What a call throws that may not wait and would take long, with nothing changed that anyone sees.
struct Busy {};

// Which prefix block is on which host page. Any thread may call.
//
// wait: false for a caller that holds Python's GIL. Such a call neither waits for another thread
// nor visits more than kFewKeys keys or held pages; it throws Busy instead, and is made again
// without the GIL. That costs more for few keys: a thread that computes in Python gives the GIL
// back only after milliseconds.
class Manager {
 public:
  // At a million pages a call takes less than a millisecond for as many keys.
  static constexpr size_t kFewKeys = 1024;

  Manager(const std::vector<GroupOptions>& groups, const Options& options);

  // Of each group the first so many pages can be used from now on: none until then, and never fewer
  // than before.
  void grow(const int64_t* ready_pages);
  // again: the same question as before, which is not counted.
  Found lookup(const Keys& keys, bool again, bool wait);
  // The job, or 0 when some key is not ready.
  int64_t prepare_load(const Keys& keys, int64_t* pages, bool wait);
  // Writes for each group the places of those keys that are to be stored, and their pages. Nothing
  // is changed when there is no room. keep: all the keys are stored, and leased without an end.
  std::optional<Stored> prepare_store(const Keys& keys, double now, bool keep, int64_t* places,
                                      int64_t* pages, int64_t* counts, bool wait);
  void end(int64_t job, bool well, bool wait);
  void touch(const Keys& keys, bool wait);
  // Of each group each block is evicted before the one in front of it. renew: all of them after
  // those of others, though they were not used once more.
  void order(const Keys& keys, bool renew, bool wait);
  // The lease, or 0 when some key is not there.
  int64_t lease(const Keys& keys, double now, double seconds, bool wait);
  // Whether it had not ended.
  bool release(int64_t lease, bool wait);
  // Others wait while the pages of running jobs are marked, however many pages there are.
  void reset();
  size_t take_events(Event* events, size_t capacity);

  // Calls with what a group has done and has.
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
    std::vector<uint32_t> wanted;  // places of keys that are to be stored
  };
  std::unique_ptr<Pages> make_pages(size_t group);
  // The lock, for a call that visits so many keys or pages.
  std::unique_lock<std::mutex> enter(size_t visits, bool wait);
  size_t total(const Keys& keys) const;
  // The page of each key, up to the first miss where nothing behind it counts.
  void find(const Keys& keys, bool all);
  int64_t longest(const Keys& keys, bool ready) const;
  std::pair<size_t, size_t> needed(const Group& group, int64_t units) const;
  void check_distinct(const Keys& keys);
  bool has_room(const Keys& keys, bool keep);
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
