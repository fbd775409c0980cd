#pragma once

#include <stdint.h>

// The C interface: everything that is no op. Called through ctypes, with the GIL released unless
// torch_kvswap/_native/loader.py says otherwise. torch_kvswap/_native/abi.py mirrors this file.

#define KVSWAP_API extern "C" __attribute__((visibility("default")))

// "CUDA", or "HIP" with a PyTorch for ROCm.
KVSWAP_API const char* kvswap_driver_name();

// The version of the driver, 13000 for 13.0; 0 without one. Does not initialise CUDA; HIP may
// initialise itself.
KVSWAP_API int kvswap_driver_version();

// Why there is no driver, or "". Never freed.
KVSWAP_API const char* kvswap_driver_error();

// Whether the driver has the batch call (CUDA 12.8 or newer, ROCm 7.1 or newer).
KVSWAP_API bool kvswap_driver_has_batch();

// Whether the driver lets streams write words of memory and wait for them, as gates do. A GPU may
// lack that all the same.
KVSWAP_API bool kvswap_driver_has_stream_words();

// Fragments in one batch call; 0 if KVSWAP_BATCH switches it off; -1 if the environment is wrong,
// with the reason in kvswap_last_error.
KVSWAP_API int kvswap_batch_limit();

// The version of the CUDA runtime in the kernels, 13000 for 13.0; 0 without kernels. They need a
// driver of the same major version or newer.
KVSWAP_API int kvswap_kernel_version();

// Pins memory for every device of the process. Safe while another thread captures a CUDA graph.
// False on failure.
KVSWAP_API bool kvswap_host_register(int device, void* address, uint64_t bytes);
KVSWAP_API bool kvswap_host_unregister(int device, void* address);
// Whether the driver says that the address is pinned: 1 or 0, -1 on failure. device: asks in its
// context; -1 asks in the thread's context and does not initialise CUDA.
KVSWAP_API int kvswap_host_is_pinned(int device, const void* address);
// PCI domain, bus and device of a GPU.
KVSWAP_API bool kvswap_device_pci_address(int device, int32_t* numbers);

// Memory of a host pool: see host_memory.h. Null or false on failure.
KVSWAP_API void* kvswap_host_map(int fd, uint64_t bytes, uint64_t alignment, bool transparent);
KVSWAP_API void kvswap_host_unmap(void* address, uint64_t bytes);
KVSWAP_API bool kvswap_host_bind(void* address, uint64_t bytes, int node);
KVSWAP_API bool kvswap_host_touch(void* address, uint64_t bytes, int threads, bool collapse,
                                  const int32_t* cpus, int cpu_count);

// Lossless encoding of blocks of bf16 values, see docs/encoding.md, by the CPU. sizes: bytes of a
// block in each slab; bases: where they are in host memory. width_eighths: bits of a slot for each
// value, in eighths of a bit.
struct kvswap_slot_format {
  uint64_t slot_bytes, metadata_bytes;
  int64_t tiles, max_escapes;
};
// False if such blocks cannot be encoded.
KVSWAP_API bool kvswap_encoding_format(const int64_t* sizes, int64_t num_slabs, int width_eighths,
                                       kvswap_slot_format* format);
// Returns 0; 1 if the block does not fit into the slot, which then holds none; -1 on failure.
KVSWAP_API int kvswap_encode_block(const int64_t* bases, const int64_t* sizes, int64_t num_slabs,
                                   int width_eighths, void* slot);
// Decodes the slabs from first_slab to end_slab - 1. Returns 0; 2 if the slot holds no block, and
// nothing was written; -1 on failure.
KVSWAP_API int kvswap_decode_block(const int64_t* bases, const int64_t* sizes, int64_t num_slabs,
                                   int width_eighths, const void* slot, int64_t first_slab,
                                   int64_t end_slab);
// The escapes of a block, however many fit into its slot; -1 on failure.
KVSWAP_API int64_t kvswap_count_escapes(const int64_t* bases, const int64_t* sizes,
                                        int64_t num_slabs);

// The error of the calling thread's last failed call, valid until its next one, and the name of the
// Python exception for it.
KVSWAP_API const char* kvswap_last_error();
KVSWAP_API const char* kvswap_last_error_type();

// Whether a tensor that the op _watch_cache was given has other memory now. Called with the GIL
// held, so that no tensor changes meanwhile.
KVSWAP_API bool kvswap_cache_moved(const void* watched);
KVSWAP_API void kvswap_cache_release(void* watched);

// A handler: the native part of torch_kvswap.OffloadHandler, whose docstrings say what the calls
// mean. Thread safe: no call blocks another one for longer than a few driver calls. On failure,
// functions that return a pointer return null, and functions that return a bool return false.

// The pages of a pool that jobs may use. kvswap_ready_range_publish changes it while the pool is
// being pinned: `end_page` grows, after `chunk_blocks` got smaller.
struct kvswap_ready_range {
  int64_t first_page, end_page;  // from first_page to end_page - 1
  // Blocks registered in one piece, counted from the first page of the pool on. No driver copy may
  // span two pieces.
  int64_t chunk_blocks;
  // This process has the pages before own_end; those from end_page on are not ready yet.
  int64_t own_end;
};
// Lets jobs use the pages before `end_page`. A thread that reads end_page with acquire order, as
// each submission does, also sees these pages registered and this chunk_blocks. A plain store from
// Python would not promise that on machines that reorder stores (arm64).
KVSWAP_API void kvswap_ready_range_publish(kvswap_ready_range* range, int64_t end_page,
                                           int64_t chunk_blocks);
// False, with an IndexError that says why, if this process cannot use the page now. num_pages: of
// the pool, in all processes.
KVSWAP_API bool kvswap_ready_range_check(const kvswap_ready_range* range, int64_t page,
                                         int64_t num_pages);

// A layout and its host pool. The lists have `num_slabs` entries. gpu_storages: where the storage
// of each slab's tensor begins.
struct kvswap_group {
  const int64_t *gpu_bases, *gpu_strides, *gpu_storages, *sizes, *host_bases, *host_strides,
      *layers;
  int64_t num_slabs, num_blocks, num_pages, blocks_per_page;
  int32_t block_space, slot_space;  // groups with equal numbers share their blocks, or their pages
  // 0: a slot of a host page has the bytes of its block, slab after slab. 1: it has them encoded
  // (csrc/encoding), with encoding_width_eighths / 8 bits for each value. All host_bases are then
  // the address of the first slot, and host_strides are the distance of slots.
  int32_t encoding, encoding_width_eighths;
  const kvswap_ready_range* ready_range;  // must outlive the handler
  int64_t number;                         // of the group in commands of a queued device
};

// Copy methods: 0 host, 1 batch, 2 strided, 3 staged, 4 kernel, 5 generic.
#define KVSWAP_COPY_METHODS 6
#define KVSWAP_FRAGMENT_SIZES 14
// Predicted seconds of a transfer: start + blocks * block + fragments * fragment, with
// fragment_seconds[i] for a fragment of 512 << i bytes. start_seconds < 0: not known, and the
// method is not chosen.
// Predicted seconds that the submitting thread takes to give it to the driver: submit_start +
// copies * submit_copy. A copy is a fragment (batch), a block's run of equidistant slabs (strided),
// or a block (other methods). Both are 0 if not known.
struct kvswap_copy_method_costs {
  double start_seconds, block_seconds;
  double submit_start_seconds, submit_copy_seconds;
  double fragment_seconds[KVSWAP_FRAGMENT_SIZES];
};
struct kvswap_copy_method_options {
  int32_t copy_method;  // for all transfers; -1: the one predicted to be fastest
  // How the user has asked for it, for the errors of kvswap_handler_create: copy_method='batch' or
  // KVSWAP_COPY_METHOD='batch'.
  const char* copy_method_setting;
  uint64_t staging_bytes;                                  // GPU memory
  kvswap_copy_method_costs costs[2][KVSWAP_COPY_METHODS];  // of stores, of loads
};

// device_kind: 0 host memory on both sides, 1 CUDA, 2 a queued device. device: its index; -1 for
// host memory. layers: in all groups together. submit_thread: a thread submits all copies.
KVSWAP_API void* kvswap_handler_create(const kvswap_group* groups, int count, int64_t layers,
                                       int device_kind, int device, bool submit_thread,
                                       const kvswap_copy_method_options* options);
// Why some copies are slower than they could be, or "". Valid as long as the handler.
KVSWAP_API const char* kvswap_handler_slower_copies(void* handler);
// False, with the error, if the handler is closed or its device lost.
KVSWAP_API bool kvswap_handler_check_open(void* handler);
// After kvswap_handler_close.
KVSWAP_API void kvswap_handler_destroy(void* handler);
// Takes new groups, with the same block sizes and pools, while no job is outstanding. Sets *done
// once it has taken them: Ctrl-C may take the return value from the caller.
KVSWAP_API bool kvswap_handler_rebind(void* handler, const kvswap_group* groups, int count,
                                      bool* done);

// What a job starts after.
enum {
  KVSWAP_AFTER_CURRENT = 0,
  KVSWAP_AFTER_STREAM = 1,
  KVSWAP_AFTER_EVENT = 2,
  KVSWAP_AFTER_NOTHING = 3
};

// An array of integers for Python: each field has eight bytes.
struct kvswap_request {
  int64_t id;        // the number of the job, set by the call
  int64_t nbytes;    // what it copies, set by the call
  void* job;         // one reference, which kvswap_job_release drops, set by the call; null before
  int64_t token;     // of the caller, for the job's result
  int64_t began_ns;  // CLOCK_MONOTONIC at the caller's call
  int64_t channel;   // 0 store, 1 load, 2 expedited load
  int64_t layer_groups;
  int64_t grouped;            // whether errors name the group of an id
  int64_t copy_engines_only;  // no kernels copy; not for encoded groups
  int64_t after_kind;
  void* after;            // a stream or an event
  void* gate;             // null for none
  const int64_t* blocks;  // of all groups, one group after the other
  const int64_t* pages;
  // The counts follow, for each group: blocks, pages, first_block.
  const int64_t* counts() const { return reinterpret_cast<const int64_t*>(this + 1); }
};

// Makes a job. What it sets, it sets together and only if it succeeds: an exception that Python
// raises right after the call loses nothing.
KVSWAP_API bool kvswap_handler_submit(void* handler, kvswap_request* request);

// The state of a job. Times are in seconds.
struct kvswap_result {
  int64_t id;
  int64_t token;        // kvswap_request.token
  uint64_t nbytes;      // of its blocks
  uint64_t link_bytes;  // between device and host: fewer if slots are encoded
  double submit_seconds, queue_seconds, copy_seconds;
  int32_t channel;
  int32_t layer_groups;
  int32_t copy_method;
  int32_t state;  // 0 queued, 1 running, 2 done, 3 failed, 4 cancelled
  // 0 other, 1 the device is lost, 2 what it reads was not written, 3 some blocks were rejected:
  // they do not fit into their slots, or their slots hold no block. The other blocks were copied.
  int32_t error_kind;
  int32_t rejected_count;
  int32_t is_cancelling;  // 1: it was cancelled and has not ended
  const char* error;      // of a failed job, valid as long as the job
  // The places of the rejected blocks in the request's list `blocks`, ascending. Valid as long as
  // the job.
  const int64_t* rejected;
  void* job;
};

enum { KVSWAP_POLLED = 64 };

// Results that were reported. taken: how many of them the caller has read, which it counts itself.
struct kvswap_ended {
  int64_t taken, count;
  kvswap_result results[KVSWAP_POLLED];
};

// Reports jobs that have ended, as many as there is room for: behind results that were not taken,
// because the caller was interrupted, or from the beginning if all were. Returns the handler's
// results, valid until all are taken and this is called again; null on failure. One thread at a
// time may call it and read them.
KVSWAP_API kvswap_ended* kvswap_handler_poll(void* handler);

// Waits on the host until a job that was not reported has ended, or all jobs have: 1, or 0 after
// `seconds`; -1 on failure.
KVSWAP_API int kvswap_handler_wait_for_ended(void* handler, double seconds);

// Jobs that have not ended, and the first of them.
struct kvswap_unended {
  int64_t count, first_id;
  int32_t first_channel;
};

// Waits on the host until the jobs have ended: 1, or 2 if one of them failed or was cancelled, or 0
// after `seconds`; -1 on failure. After 0, *unended says which jobs have not ended. jobs: null for
// all that were not reported.
KVSWAP_API int kvswap_handler_synchronize(void* handler, void* const* jobs, int count,
                                          double seconds, kvswap_unended* unended);

// Writes up to `capacity` results of jobs that failed or were cancelled and were not reported yet,
// each with a reference to its job. Returns how many; -1 on failure.
KVSWAP_API int kvswap_handler_unreported_failures(void* handler, kvswap_result* results,
                                                  int capacity);

// Refuses further jobs, and waits until all have ended and the threads are gone: 1, or 0 after
// `seconds`, to be called again; -1 on failure.
KVSWAP_API int kvswap_handler_close(void* handler, double seconds);

// Null is no reference.
KVSWAP_API void kvswap_job_release(void* job);
// What is known of the job. Does not ask the device.
KVSWAP_API bool kvswap_job_result(void* handler, void* job, kvswap_result* result);
// Asks the device: 1 if the job has ended, 0 if not; -1 on failure.
KVSWAP_API int kvswap_job_query(void* handler, void* job);
// Makes a stream wait for a layer group of the job; -1: all. stream_device: the GPU of the stream;
// -1: the current stream of the handler's GPU.
KVSWAP_API bool kvswap_job_wait(void* handler, void* job, int layer_group, void* stream,
                                int stream_device);
// 1: the job will be reported as cancelled. 0: it has ended. -1 on failure.
KVSWAP_API int kvswap_job_cancel(void* handler, void* job);

// A gate for this many layer groups, and a wait for one of them. Valid until kvswap_gate_release,
// also without its handler. What waits for the gate, such as a captured graph, works even after
// that.
KVSWAP_API void* kvswap_gate_create(void* handler, int layer_groups);
KVSWAP_API void kvswap_gate_release(void* gate);
KVSWAP_API bool kvswap_gate_wait(void* gate, int layer_group, void* stream, int stream_device);

// A queued device: one that Python drives with torch, see device/queued.h. The calls may be made by
// any thread. Only kvswap_queue_wait blocks.

enum {
  // Copies blocks of a group. `numbers`: the blocks, and their slots. `event`: the start of the
  // transfer.
  KVSWAP_COMMAND_BLOCKS = 0,
  // Copies fragments, or none. `numbers`: target addresses, source addresses, bytes. `event`: the
  // start of the transfer.
  KVSWAP_COMMAND_BATCH = 1,
  KVSWAP_COMMAND_RECORD = 2,       // records `event` on `stream`
  KVSWAP_COMMAND_WAIT = 3,         // `stream` waits for `event`
  KVSWAP_COMMAND_CALLER_WAIT = 4,  // the same for the `stream` that kvswap_job_wait was given
  KVSWAP_COMMAND_DESTROY_EVENT = 5,
  KVSWAP_COMMAND_DESTROY_STREAM = 6
};

struct kvswap_command {
  int32_t kind;
  int32_t to_host;  // of copies
  int32_t timed;    // the time of the record is asked for
  int32_t reserved;
  uint64_t stream, event;                // numbers, never used again
  uint64_t record;                       // which record of the event this is, from 1 on
  int64_t group;                         // kvswap_group::number
  int64_t first_slab, last_slab, count;  // last_slab is not copied
  const int64_t* numbers[3];
};

// A device that does not exist yet; it lives as long as the process. name: for errors. has_batch:
// it carries out KVSWAP_COMMAND_BATCH with fragments. Null on failure.
KVSWAP_API void* kvswap_queue_create(int index, const char* name, bool has_batch);
// Waits until there are commands: 1, or 0 after `seconds` or kvswap_queue_wake, or -1 once
// kvswap_queue_stop was called. One thread.
KVSWAP_API int kvswap_queue_wait(void* queue, double seconds);
// The next wait, or the one that waits now, returns at once.
KVSWAP_API void kvswap_queue_wake(void* queue);
// Whether all commands were carried out.
KVSWAP_API bool kvswap_queue_is_empty(void* queue);
// Reads the first command; false if there is none. It stays the first one, and valid, until
// kvswap_queue_done. One thread at a time.
KVSWAP_API bool kvswap_queue_first(void* queue, kvswap_command* command);
KVSWAP_API void kvswap_queue_done(void* queue);
// This record of an event has happened, `seconds` after some point in time that is the same for all
// events of the stream. error: why the transfer that it ends has failed, or null.
KVSWAP_API void kvswap_queue_happened(void* queue, uint64_t event, uint64_t record, double seconds,
                                      const char* error);
// The device runs nothing any more: all jobs end as failed.
KVSWAP_API void kvswap_queue_lose(void* queue, const char* error);
KVSWAP_API void kvswap_queue_stop(void* queue);
// An event for KVSWAP_AFTER_EVENT, and its number. Its first record counts as made, and has not
// happened.
KVSWAP_API void* kvswap_queue_make_event(void* queue, uint64_t* number);
// After the commands that were given so far.
KVSWAP_API void kvswap_queue_destroy_event(void* queue, void* event);

// Counts of durations: counts[0] up to 1 us, counts[i] up to 2^i us, the last one all others. sum:
// of all, in seconds.
#define KVSWAP_BUCKETS 26
struct kvswap_histogram {
  uint64_t counts[KVSWAP_BUCKETS];
  double sum;
};

// The counters of a channel since the handler was made, and what it has to do now.
struct kvswap_metrics {
  uint64_t submitted, done, failed, cancelled;  // jobs
  uint64_t bytes, link_bytes;                   // of the jobs that are done
  // Blocks of the jobs that are done, or failed because some blocks were rejected. Encoded ones are
  // in groups with encoded pages.
  uint64_t blocks, encoded_blocks, rejected_blocks;
  uint64_t queued, running;                           // jobs: in software, on the device
  uint64_t transfers;                                 // copies submitted to the device
  uint64_t streams, events;                           // that exist
  uint64_t jobs_by_copy_method[KVSWAP_COPY_METHODS];  // that are done
  kvswap_histogram submit, queue, copy;               // seconds
};

KVSWAP_API bool kvswap_handler_metrics(void* handler, int channel, kvswap_metrics* metrics);

// A block manager: the native part of torch_kvswap.BlockManager, which knows the host page of each
// prefix block. Thread safe. Keys are digests of KVSWAP_DIGEST_BYTES in one array, first those of
// the first group, then those of the next one; `counts` says how many there are in each group.
// Times are in seconds of a monotonic clock. Pages and key indices are for each group in turn.
//
// wait: false for a caller that holds Python's GIL. Such a call does not wait for another thread,
// and takes a few hundred microseconds at most: with more than KVSWAP_BLOCKS_FEW_KEYS keys, or
// while another thread is in a call, it does nothing and returns KVSWAP_BLOCKS_BUSY. The caller
// then releases the GIL and calls again with wait.

#define KVSWAP_DIGEST_BYTES 32
#define KVSWAP_BLOCKS_FEW_KEYS 1024
#define KVSWAP_BLOCKS_BUSY (-2)

struct kvswap_blocks_group {
  int64_t num_pages;  // 2^29 at most
  int64_t ratio;      // blocks of the group in a unit of prefix; a hit ends at the end of a unit
  int64_t window;     // blocks before its end that a hit needs; 0: all of them
};

struct kvswap_blocks_options {
  int32_t policy;           // 0 LRU, 1 ARC
  int32_t events;           // kinds that kvswap_blocks_take_events gives: bit 1 << kind
  int64_t store_threshold;  // lookups of a block before it is stored
  int64_t lookup_capacity;  // blocks with a counter of lookups
};

// Null on failure. No page can be used before kvswap_blocks_grow.
KVSWAP_API void* kvswap_blocks_create(const kvswap_blocks_group* groups, int count,
                                      const kvswap_blocks_options* options);
KVSWAP_API void kvswap_blocks_destroy(void* blocks);

// From now on the first ready_pages[g] pages of group g can be used: num_pages at most, never fewer
// than before. False on failure.
KVSWAP_API bool kvswap_blocks_grow(void* blocks, const int64_t* ready_pages);

// Units of prefix.
struct kvswap_blocks_lookup_result {
  int64_t found;    // cached
  int64_t ready;    // with all needed blocks ready
  int64_t pending;  // blocks, not units: cached, and not ready
};

// again: a repeated lookup, which is not counted. Returns 1, -1 on failure, or KVSWAP_BLOCKS_BUSY,
// as the functions below do.
KVSWAP_API int64_t kvswap_blocks_lookup(void* blocks, const void* keys, const int64_t* counts,
                                        bool again, kvswap_blocks_lookup_result* result, bool wait);

// Reserves the pages of the keys for a load. Returns the reservation, with a page for each key; 0
// if some key is not ready.
KVSWAP_API int64_t kvswap_blocks_prepare_load(void* blocks, const void* keys, const int64_t* counts,
                                              int64_t* pages, bool wait);

// Writes the indices and pages of the keys that are to be stored, new_counts of them in each group,
// and the reservation; 0 if there are none. keep: all keys are stored, and leased without an end.
// Returns 1; 0 if there is no room, and nothing has changed.
KVSWAP_API int64_t kvswap_blocks_prepare_store(void* blocks, const void* keys,
                                               const int64_t* counts, double now, bool keep,
                                               int64_t* key_indices, int64_t* pages,
                                               int64_t* new_counts, int64_t* reservation,
                                               int64_t* lease, bool wait);

// Ends a reservation, after the copy. rejected: positions of the pages whose blocks are forgotten
// although the copy succeeded, ascending. Returns 1.
KVSWAP_API int64_t kvswap_blocks_end(void* blocks, int64_t reservation, bool succeeded,
                                     const int64_t* rejected, int64_t num_rejected, bool wait);

// Marks the blocks as used. Returns 1.
KVSWAP_API int64_t kvswap_blocks_touch(void* blocks, const void* keys, const int64_t* counts,
                                       bool wait);

// Later blocks are evicted before earlier ones. renew: and all of them after other keys' blocks.
// Returns 1.
KVSWAP_API int64_t kvswap_blocks_order(void* blocks, const void* keys, const int64_t* counts,
                                       bool renew, bool wait);

// Returns the lease; 0 if some key is not cached.
KVSWAP_API int64_t kvswap_blocks_lease(void* blocks, const void* keys, const int64_t* counts,
                                       double now, double seconds, bool wait);
// Returns 1; 0 if the lease has ended before.
KVSWAP_API int64_t kvswap_blocks_release(void* blocks, int64_t lease, bool wait);

// Forgets all keys. Blocks other calls only briefly. False on failure.
KVSWAP_API bool kvswap_blocks_reset(void* blocks);

struct kvswap_blocks_event {
  int32_t kind;   // 0 stored, 1 evicted, 2 all keys were forgotten, 3 events were lost
  int32_t group;  // -1: all
  uint8_t key[KVSWAP_DIGEST_BYTES];
};

// Writes the oldest events. Returns how many; -1 on failure.
KVSWAP_API int64_t kvswap_blocks_take_events(void* blocks, kvswap_blocks_event* events,
                                             int64_t capacity);

// Counts of one group's blocks since the start, then of its pages now; `pages` can be used.
struct kvswap_blocks_stats {
  uint64_t asked, hits, pending, stored, loaded, evicted, skipped;
  uint64_t refused, failed;  // stores without room; blocks of failed copies
  uint64_t pages, free_pages, idle_pages, filling_pages;
};

KVSWAP_API bool kvswap_blocks_stats_of(void* blocks, int group, double now,
                                       kvswap_blocks_stats* stats);

// The version of this file and of torch_kvswap/_native/abi.py, which loads no library of another
// version. Goes up with every change of a function or a structure.
#define KVSWAP_ABI_VERSION 13
KVSWAP_API int kvswap_abi_version();
