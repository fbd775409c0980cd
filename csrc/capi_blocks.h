#pragma once

#include "capi.h"

// The native part of torch_kvswap.BlockManager: which prefix block is on which host page. Any
// thread may call. Keys are digests of KVSWAP_DIGEST_BYTES, one after another, those of the first
// group, then those of the next; `counts` has how many there are in each group. Times are in
// seconds of a clock that never goes back. Pages, places and counts are for each group in turn.
//
// wait: false for a caller that holds Python's GIL. Such a call neither waits for another thread
// nor takes longer than some hundred microseconds: with more than KVSWAP_BLOCKS_FEW_KEYS keys, or
// while another thread is in a call, it answers KVSWAP_BLOCKS_BUSY and has done nothing. The caller
// then lets the GIL go, and makes the call with wait.

#define KVSWAP_DIGEST_BYTES 32
#define KVSWAP_BLOCKS_FEW_KEYS 1024
#define KVSWAP_BLOCKS_BUSY (-2)

struct kvswap_blocks_group {
  int64_t num_pages;  // 2^29 at most
  int64_t ratio;      // blocks of the group in a unit of prefix, at the end of which a hit can end
  int64_t window;     // blocks before its end that a hit needs; 0: all of them
};

struct kvswap_blocks_options {
  int32_t policy;           // 0 LRU, 1 ARC
  int32_t events;           // kinds that kvswap_blocks_events gives: bit 1 << kind
  int64_t store_threshold;  // lookups of a block before it is stored
  int64_t asked_capacity;   // blocks whose number of lookups is remembered
};

// Null on failure. No page can be used before kvswap_blocks_grow.
KVSWAP_API void* kvswap_blocks_create(const kvswap_blocks_group* groups, int count,
                                      const kvswap_blocks_options* options);
KVSWAP_API void kvswap_blocks_destroy(void* blocks);

// Of each group the first so many pages, num_pages at most, can be used from now on; never fewer
// than before. False on failure.
KVSWAP_API bool kvswap_blocks_grow(void* blocks, const int64_t* ready_pages);

// Units of prefix.
struct kvswap_blocks_found {
  int64_t found;    // cached
  int64_t ready;    // cached with all that is needed ready
  int64_t pending;  // blocks that are not ready, of those that `found` needs
};

// again: the question was asked before and is not counted. 1, -1 on failure, or
// KVSWAP_BLOCKS_BUSY; so are those below.
KVSWAP_API int64_t kvswap_blocks_lookup(void* blocks, const void* keys, const int64_t* counts,
                                        bool again, kvswap_blocks_found* found, bool wait);

// The job, with a page for each key; 0 when some key is not ready.
KVSWAP_API int64_t kvswap_blocks_prepare_load(void* blocks, const void* keys, const int64_t* counts,
                                              int64_t* pages, bool wait);

// places, pages: of the keys that are to be stored, new_counts of each group. job: 0 when there are
// none. keep: all keys are stored and are in `lease`, which has no end. 1; 0 when there is no room,
// and nothing has changed.
KVSWAP_API int64_t kvswap_blocks_prepare_store(void* blocks, const void* keys,
                                               const int64_t* counts, double now, bool keep,
                                               int64_t* places, int64_t* pages, int64_t* new_counts,
                                               int64_t* job, int64_t* lease, bool wait);

// The job has ended, well or not. 1.
KVSWAP_API int64_t kvswap_blocks_end(void* blocks, int64_t job, bool well, bool wait);

// 1.
KVSWAP_API int64_t kvswap_blocks_touch(void* blocks, const void* keys, const int64_t* counts,
                                       bool wait);

// Each block is evicted before the one in front of it. renew: all of them after those of others. 1.
KVSWAP_API int64_t kvswap_blocks_order(void* blocks, const void* keys, const int64_t* counts,
                                       bool renew, bool wait);

// The lease; 0 when some key is not there.
KVSWAP_API int64_t kvswap_blocks_lease(void* blocks, const void* keys, const int64_t* counts,
                                       double now, double seconds, bool wait);
// 1; 0 when it has ended before.
KVSWAP_API int64_t kvswap_blocks_release(void* blocks, int64_t lease, bool wait);

// Other calls go on while it makes new tables. False on failure.
KVSWAP_API bool kvswap_blocks_reset(void* blocks);

struct kvswap_blocks_event {
  int32_t kind;   // 0 stored, 1 evicted, 2 all are gone, 3 events were lost
  int32_t group;  // -1: all
  uint8_t key[KVSWAP_DIGEST_BYTES];
};

// How many were written, the oldest first; -1 on failure.
KVSWAP_API int64_t kvswap_blocks_events(void* blocks, kvswap_blocks_event* events,
                                        int64_t capacity);

// Blocks of one group since the start, then pages now; `pages` are those that can be used.
struct kvswap_blocks_stats {
  uint64_t asked, hits, pending, stored, loaded, evicted, skipped;
  uint64_t refused, failed;  // stores for which there was no room; blocks of jobs that failed
  uint64_t pages, free_pages, idle_pages, filling_pages;
};

KVSWAP_API bool kvswap_blocks_stats_of(void* blocks, int group, double now,
                                       kvswap_blocks_stats* stats);
