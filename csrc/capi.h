#pragma once

#include <stdint.h>

// The C interface to what is no op, called through ctypes with the GIL released.

#define KVSWAP_API extern "C" __attribute__((visibility("default")))

// The version of the CUDA driver, 13000 for 13.0; 0 without one. Does not initialise CUDA.
KVSWAP_API int kvswap_driver_version();

// Why there is no driver, or "". Valid as long as the library.
KVSWAP_API const char* kvswap_driver_error();

// Whether the driver has the batch call (CUDA 12.8 or newer).
KVSWAP_API bool kvswap_driver_has_batch();

// Fragments in one batch call; 0 where KVSWAP_BATCH switches it off; -1 where the environment is
// wrong: kvswap_last_error says how.
KVSWAP_API int kvswap_batch_limit();

// The version of the CUDA runtime in the kernels, 13000 for 13.0; 0 where there are none. They need
// a driver of the same major version or newer.
KVSWAP_API int kvswap_kernel_version();

// Pins memory for every device of the process, while any thread may capture a CUDA graph. False on
// failure.
KVSWAP_API bool kvswap_host_register(int device, void* address, uint64_t bytes);
KVSWAP_API bool kvswap_host_unregister(int device, void* address);
// Whether the driver says that the address is pinned: 1 or 0, -1 on failure. device: in whose
// context it is asked; -1 asks in that of the thread and does not initialise CUDA.
KVSWAP_API int kvswap_host_is_pinned(int device, const void* address);
// PCI domain, bus and device of a GPU.
KVSWAP_API bool kvswap_device_pci_address(int device, int32_t* numbers);

// Memory of a host pool, csrc/host_memory.h. Null or false on failure.
KVSWAP_API void* kvswap_host_map(int fd, uint64_t bytes, uint64_t alignment, bool transparent);
KVSWAP_API void kvswap_host_unmap(void* address, uint64_t bytes);
KVSWAP_API bool kvswap_host_bind(void* address, uint64_t bytes, int node);
KVSWAP_API bool kvswap_host_touch(void* address, uint64_t bytes, int threads, bool collapse,
                                  const int32_t* cpus, int cpu_count);

// The error of the calling thread's last call that failed, valid until its next one, and the Python
// exception that stands for it.
KVSWAP_API const char* kvswap_last_error();
KVSWAP_API const char* kvswap_last_error_type();

// Whether one of the tensors that the op _watch_cache was given has other memory now. Python calls
// it with the GIL held, so that no tensor changes meanwhile.
KVSWAP_API bool kvswap_cache_moved(const void* watched);
KVSWAP_API void kvswap_cache_release(void* watched);

// A handler: the native part of torch_kvswap.OffloadHandler, which says what the calls mean. Any
// thread may call, and no call holds up another one for longer than a few driver calls. Functions
// that return a pointer return null on failure, and those that return a truth false.

// What of a pool can be used now. kvswap_usable_pages_publish changes it while the pool is pinned:
// `last_page` grows, after `chunk_blocks` has got smaller if it does.
struct kvswap_usable_pages {
  int64_t first_page, last_page;  // the last is not one of them
  // Blocks that are registered in one piece, counted from the first page of the pool on: no copy of
  // the driver may run from one piece into the next.
  int64_t chunk_blocks;
};
// Lets jobs use the pages before `last_page`. Whoever reads last_page with acquire order, as each
// submission does, then also sees the pages registered and chunk_blocks as it was given here; on
// machines that reorder stores (arm64) a store of Python's ctypes would promise neither.
KVSWAP_API void kvswap_usable_pages_publish(kvswap_usable_pages* usable, int64_t last_page,
                                            int64_t chunk_blocks);

// A layout and its host pool; lists have `planes` entries. gpu_storages: where the memory begins
// that goes as a whole, that of a tensor.
struct kvswap_group {
  const int64_t *gpu_bases, *gpu_strides, *gpu_storages, *sizes, *host_bases, *host_strides,
      *layers;
  int64_t planes, num_blocks, num_pages, blocks_per_page;
  int32_t block_space, slot_space;    // equal numbers share their blocks, or their pages
  const kvswap_usable_pages* usable;  // as long as the handler
};

// Predicted seconds of a transfer: start + blocks * block + fragments * that of their size, where
// fragment_seconds[i] is of one of 512 << i bytes. start_seconds < 0: not known, so that the path
// is not chosen.
#define KVSWAP_PATHS 5
#define KVSWAP_FRAGMENT_SIZES 14
struct kvswap_path_costs {
  double start_seconds, block_seconds;
  double fragment_seconds[KVSWAP_FRAGMENT_SIZES];
};
struct kvswap_path_options {
  int32_t path;            // that is always taken; -1 for the one that is predicted to be best
  uint64_t staging_bytes;  // GPU memory
  kvswap_path_costs costs[2][KVSWAP_PATHS];  // of stores, of loads
};

// device: -1 for host memory on both sides. layers: in all groups together. threaded: who submits a
// job leaves all copies to a thread.
KVSWAP_API void* kvswap_handler_create(const kvswap_group* groups, int count, int64_t layers,
                                       int device, bool threaded,
                                       const kvswap_path_options* options);
// Why paths that would be chosen cannot be had, or "". Valid as long as the handler.
KVSWAP_API const char* kvswap_handler_path_problem(void* handler);
// After kvswap_handler_close.
KVSWAP_API void kvswap_handler_destroy(void* handler);
// Takes new groups, with the same block sizes and pools, while no job is outstanding.
KVSWAP_API bool kvswap_handler_rebind(void* handler, const kvswap_group* groups, int count);

// What a job starts behind.
enum {
  KVSWAP_AFTER_CURRENT = 0,
  KVSWAP_AFTER_STREAM = 1,
  KVSWAP_AFTER_EVENT = 2,
  KVSWAP_AFTER_NOTHING = 3
};

struct kvswap_request {
  double began;     // CLOCK_MONOTONIC at the caller's call, in seconds
  int32_t channel;  // 0 store, 1 load, 2 expedited load
  int32_t layer_groups;
  int32_t after_kind;
  int32_t grouped;        // whether errors name the group of an id
  int32_t background;     // whether only copy engines may copy
  void* after;            // a stream or an event
  void* gate;             // null for none
  const int64_t* blocks;  // of all groups, one group after the other
  const int64_t* pages;
  const int64_t* counts;  // for each group: blocks, pages, first_block
  int64_t id;             // the number of the job, set by the call
};

// A job with one reference, which kvswap_job_release drops.
KVSWAP_API void* kvswap_handler_submit(void* handler, kvswap_request* request);

// How a job has ended, or that it has not; times in seconds.
struct kvswap_result {
  int64_t id;
  uint64_t nbytes;
  double submit_seconds, queue_seconds, copy_seconds;
  int32_t channel;
  int32_t layer_groups;
  int32_t path;       // 0 host, 1 batch, 2 strided, 3 staged, 4 kernel
  int32_t state;      // 0 queued, 1 running, 2 done, 3 failed, 4 cancelled
  const char* error;  // of a failed job, valid as long as the job
  void* job;
};

// Up to `capacity` results of jobs that have ended since the last call; each holds a reference to
// its job. -1 on failure.
KVSWAP_API int kvswap_handler_finished(void* handler, kvswap_result* results, int capacity);

// Waits until the jobs have ended: 1, or 2 when one of them is not done, or 0 after `seconds`; -1
// on failure. jobs: null for all that were not reported.
KVSWAP_API int kvswap_handler_wait(void* handler, void* const* jobs, int count, double seconds);

// Up to `capacity` results of jobs that have failed or were cancelled and were not reported yet,
// each with a reference to its job.
KVSWAP_API int kvswap_handler_unreported_failures(void* handler, kvswap_result* results,
                                                  int capacity);

// Refuses further jobs, and waits until all have ended and the threads are gone: 1, or 0 when that
// was not so after `seconds`, to be called again; -1 on failure.
KVSWAP_API int kvswap_handler_close(void* handler, double seconds);

KVSWAP_API void kvswap_job_release(void* job);
// What was found out before; does not ask the device.
KVSWAP_API bool kvswap_job_result(void* handler, void* job, kvswap_result* result);
// Asks the device: 1 when the job has ended, 0 when it has not; -1 on failure.
KVSWAP_API int kvswap_job_done(void* handler, void* job);
// Makes a stream wait for the end of a group of layers of the job; -1: all. stream_device: the GPU
// of the stream; -1 stands for the stream that is current on the handler's GPU.
KVSWAP_API bool kvswap_job_wait_on(void* handler, void* job, int layer_group, void* stream,
                                   int stream_device);
// 1: it is or will be reported as cancelled, 0: it has ended; -1 on failure.
KVSWAP_API int kvswap_job_cancel(void* handler, void* job);

// A gate with this many parts, and a wait for one of them. Valid until kvswap_gate_release, also
// without its handler; what waits for the gate, such as a captured graph, goes on working then.
KVSWAP_API void* kvswap_gate_create(void* handler, int parts);
KVSWAP_API void kvswap_gate_release(void* gate);
KVSWAP_API bool kvswap_gate_wait(void* gate, int part, void* stream, int stream_device);

// Seconds: counts[0] has those up to 1 us, counts[i] those up to 2^i us, the last all above.
#define KVSWAP_BUCKETS 26
struct kvswap_histogram {
  uint64_t counts[KVSWAP_BUCKETS];
  double sum;
};

// What a channel has done, and has to do.
struct kvswap_metrics {
  uint64_t submitted, done, failed, cancelled;  // jobs
  uint64_t bytes;                               // of the jobs that are done
  uint64_t queued, running;                     // jobs: in software, on the device
  uint64_t transfers;                           // copies given to the device
  uint64_t streams, events;                     // that exist
  uint64_t jobs_by_path[KVSWAP_PATHS];          // that are done
  kvswap_histogram submit, queue, copy;         // seconds
};

KVSWAP_API bool kvswap_handler_metrics(void* handler, int channel, kvswap_metrics* metrics);

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

// Of this file and of torch_kvswap/_native/abi.py, which loads no library of another one. Goes up
// with every change of a function or a structure.
#define KVSWAP_ABI_VERSION 1
KVSWAP_API int kvswap_abi_version();
