#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "copy/copy_method.h"
#include "copy/exchange.h"
#include "copy/slab_runs.h"
#include "encoding/encoding.h"

// What csrc/offload needs of a device: contexts, streams, events, what it knows of memory, and the
// copies. cuda.h and host.h implement it.
//
// To add a device:
// 1. Derive from Device and Copier in a file of this folder. copy_methods() lists the methods that
//    the copier has; others are never chosen. Implement PackKernels only if the device has them.
// 2. Give it a DeviceKind, name that in csrc/bindings/handler.cpp, and let find_device() return it.
//    csrc/offload stays as it is.
//
// Unless a function says otherwise:
// - The context of the device is current in the calling thread (ContextGuard).
// - The scheduler's lock is held. The call does not block, takes microseconds, and does not call
//   the handler. Copier::copy() and Copier::synchronize(), and the calls of Device between them,
//   are made without the lock by the one thread that owns the channel.
// - A failure throws std::runtime_error with the name of the call and its error. The job fails with
//   that text. If is_alive() is false afterwards, the device is lost, and all jobs fail.
// - No memory is allocated per copied block, except where the driver's call needs a list.
// - Streams and events are opaque. Only the device that made them reads them.
namespace kvswap {

using Stream = void*;
using Event = void*;

// A stream of the caller, which may be of another device of the same kind. The handle alone does
// not identify it: 0 is the default stream of whatever context is current.
struct StreamRef {
  int device;
  Stream handle;
};

// Room for what a ContextGuard restores.
struct ContextState {
  alignas(void*) unsigned char bytes[16];
};

// Blocks of one group that are copied by one method.
struct PartCopy : PagedCopy {
  CopyMethod method;
  const Encoding* encoding;          // of the slots; can use the method
  const PackTable* table;            // null where the kernels cannot be used
  const std::vector<SlabRun>* runs;  // of all slabs of the group
  // The head or tail of a staged transfer, copied without staging. It does not wait until earlier
  // parts are unpacked.
  bool is_head_or_tail;
};

// Where the next copy of some parts begins: in this part, at this byte of its blocks.
struct CopyPosition {
  size_t part = 0;
  uint64_t byte = 0;
};

// Of a relay: its device, and what it was given.
struct RelayedBytes {
  int device;
  uint64_t bytes;
};

// The copies of one channel, all in one direction. One thread at a time.
class Copier {
 public:
  virtual ~Copier() = default;

  // From now on parts can be staged, in `bytes` bytes from `begin` on of the memory that
  // PackKernels has allocated. Not called for a device without PackKernels.
  virtual void use_staging(uint64_t /*begin*/, uint64_t /*bytes*/) {}
  // From now on the link of another device of the same kind takes part in large staged copies, with
  // this memory there. After use_staging().
  virtual void add_relay(int /*device*/, uint64_t /*begin*/, uint64_t /*bytes*/) {}
  // Undoes that, before the first copy. Nothing if it was not added.
  virtual void remove_relay(int /*device*/) noexcept {}
  // Makes what the next copies do on streams of their own start after these events; the channel's
  // stream waits for them already. Called once for each transfer.
  virtual void start_after(const std::vector<Event>& /*events*/) {}

  // Gives the exchange its ring: see Exchange. From now on staged parts are its loads whenever it
  // is loading. After use_staging().
  virtual void use_exchange(std::shared_ptr<Exchange> /*exchange*/, uint64_t /*place_bytes*/) {}

  // Enqueues copies. What they do on the channel's stream starts after the work in it so far.
  // Returns the stream on which they end. May block while the device's queue is full. If it throws,
  // some bytes may be copied; the caller then calls synchronize() before the next copy().
  // - start: an event recorded on the channel's stream before the copies.
  // - has_pageable: some host page of the handler is not pinned.
  // - next: where to begin. Set to where the call has stopped: {parts.size(), 0} if nothing is
  //   left. Otherwise the returned stream means nothing, and the next call goes on with the same
  //   parts.
  // - bytes: the call stops once it has staged so many bytes, at the end of a piece. Reduced by the
  //   bytes that it has staged.
  virtual Stream copy(const std::vector<PartCopy>& parts, Event start, bool has_pageable,
                      CopyPosition& next, uint64_t& bytes) = 0;

  // Blocks until all that was enqueued has run. False when the device, or a relay, is lost.
  virtual bool synchronize() noexcept = 0;
  // Whether a relay was given a part of what was copied since start_after().
  virtual bool has_relayed() const { return false; }
  // Whether the relays still answer. Any thread.
  virtual bool relays_are_alive() const noexcept { return true; }
  // After a relay was lost: whether this device has done what it was given, too. It may wait for
  // the relay for ever. True if this device is lost.
  virtual bool is_drained() const noexcept { return true; }

  // How many fragments, of a transfer with many, take one entry in the queue of the channel's
  // stream.
  virtual size_t fragments_per_entry() const { return 1; }

  // How many streams and events the copier has, not counting the channel's own.
  virtual size_t num_streams() const { return 0; }
  virtual size_t num_events() const { return 0; }
  // What each relay was given so far.
  virtual std::vector<RelayedBytes> relayed_bytes() const { return {}; }
};

// Kernels that copy blocks, for the methods kStaged and kKernel.
class PackKernels {
 public:
  // Throws if they cannot be used. Called when a handler is made; may block.
  virtual void load_kernels() = 0;
  // Memory for staging buffers, on this device or on a relay (its index).
  virtual uint64_t allocate_staging(int device, uint64_t bytes) = 0;
  virtual void free_staging(int device, uint64_t address) noexcept = 0;

 protected:
  ~PackKernels() = default;
};

// The allocation of each address, as a number: equal numbers are the same allocation. Fragments are
// merged only within one allocation.
struct Allocations {
  std::vector<uint64_t> cache, host;
  bool host_is_pageable = false;  // some host address is not pinned for the device
};

class Device {
 public:
  explicit Device(int index) : index_(index) {}
  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // See find_device().
  int index() const { return index_; }
  // "CUDA device 0", for errors.
  virtual std::string name() const = 0;
  // Whether only threads of the caller copy: in store() or load(), so that the job has ended when
  // the call returns, or in catch_up() and wait_event(). Then nothing stays queued.
  virtual bool is_synchronous() const = 0;
  // Called before the device is asked for ends on behalf of a thread that polls or waits on the
  // host. A device that copies late copies now what it was given so far, which may take long, or
  // only what the event `until` stands for. Returns whether there was anything.
  virtual bool catch_up(Event /*until*/ = nullptr) noexcept { return false; }

  // Contexts: only ContextGuard calls these. Any thread, also without the lock.

  virtual void enter(ContextState& /*state*/) {}
  virtual void leave(ContextState& /*state*/) noexcept {}

  // Streams of the library.

  // A stream that does not synchronise with the default stream; null on a synchronous device. May
  // block while the device is busy: streams are made with their handler.
  virtual Stream create_stream() = 0;
  // Work that is in the stream still runs. Not an error on a lost device.
  virtual void destroy_stream(Stream stream) noexcept = 0;
  // Whether the work in the stream so far has ended.
  virtual bool is_idle(Stream stream) = 0;
  // Whether the device still answers.
  virtual bool is_alive(Stream stream) noexcept = 0;

  // Streams of the caller. These calls need no context: they make the stream's current.

  // The stream that is current in torch, in the calling thread. By default there is none.
  virtual StreamRef current_stream() const { return {index_, nullptr}; }
  virtual bool is_capturing(const StreamRef& /*stream*/) { return false; }
  virtual void wait_event(const StreamRef& stream, Event event) = 0;

  // Events. `purpose` is appended to the name of the call in errors.

  // timed: for seconds_between().
  virtual Event create_event(bool timed) = 0;
  // Waits that are enqueued stay valid. Not an error on a lost device.
  virtual void destroy_event(Event event) noexcept = 0;
  // The event stands for the work in the stream so far.
  virtual void record_event(Event event, Stream stream, const char* purpose = "") = 0;
  // Work given to the stream from now on waits for the latest record of the event.
  virtual void wait_event(Stream stream, Event event, const char* purpose = "") = 0;
  // Whether the work that the event stands for has ended. The event may be the caller's. Also
  // called without the lock, by threads that poll.
  virtual bool has_happened(Event event) = 0;
  // Both events are timed and have happened.
  virtual double seconds_between(Event start, Event end) = 0;

  // Memory. These calls may take milliseconds.

  // The allocations of a cache and of its host pages, by an address in each. Throws if a cache
  // address is not memory of this device. By default all are one.
  virtual Allocations find_allocations(const std::vector<uint64_t>& cache,
                                       const std::vector<uint64_t>& host);
  // Host memory that copies may write. Any thread, without the lock and without a context. Blocks;
  // a large range takes seconds.
  virtual void* allocate_host(uint64_t bytes) = 0;
  virtual void free_host(void* address) = 0;

  // Copies.

  // One or more. The first is taken if the rule knows none of them. kBatch must be one of them if
  // find_allocations() may report pageable host memory, which only kBatch copies.
  virtual const std::vector<CopyMethod>& copy_methods() const = 0;
  // A copier for one channel. copies: the channel's stream.
  virtual std::unique_ptr<Copier> make_copier(Stream copies, bool to_host) = 0;

  // What only some devices have; null for others. The object lives as long as the device.
  virtual PackKernels* pack_kernels() { return nullptr; }

 private:
  const int index_;
};

// Makes the context of the device current in the calling thread as long as the guard exists. Any
// thread. Costs nothing within another guard for the same device. Throws if the device is lost.
class ContextGuard {
 public:
  explicit ContextGuard(Device& device) : device_(device) { device_.enter(state_); }
  ~ContextGuard() { device_.leave(state_); }
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  Device& device_;
  ContextState state_;
};

enum class DeviceKind : int { kHost = 0, kCuda = 1 };

// The device of this kind. index: torch's, -1 for host memory. It lives as long as the
// process, because jobs outlive their handlers. Any thread; no context is needed.
Device& find_device(DeviceKind kind, int index);

}  // namespace kvswap
