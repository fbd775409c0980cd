#pragma once

#include <algorithm>
#include <deque>

#include "copy/batch.h"
#include "copy/packing.h"
#include "copy/relay.h"
#include "copy/staged_piece.h"
#include "copy/staging_ring.h"

namespace kvswap {

// The streams of a staged copy: the copy engine's and the kernels', of one device.
struct StagedStreams {
  cuda::StreamRef copies, kernels;
};

// Copies to and from host pages through a ring on the GPU. A store is copied in pieces: a kernel
// packs blocks into one piece of the ring while the copy engine copies the piece before it to the
// host pages. A load goes the other way. Pieces of a large transfer go over the GPU's own link and
// through its relays at the same time.
//
// One thread at a time; the context of its device is current. The memory is the caller's.
class StagingBuffer {
 public:
  StagingBuffer(const StagedStreams& streams, bool to_host, cuda::Address begin, uint64_t bytes)
      : streams_(streams), to_host_(to_host), ring_(streams.copies.device, begin, bytes) {
    ring_.add_filler(to_host ? streams.kernels : streams.copies);
  }

  // Pieces also go through this GPU from now on, and through this memory of it. See Relay.
  void add_relay(int peer, cuda::Address begin, uint64_t bytes);
  // The other way round, for the relay that was added last.
  void remove_relay(int peer) noexcept;
  const std::deque<Relay>& relays() const { return relays_; }

  // The next copies are of another transfer: the links start with nothing to do.
  void begin_transfer() noexcept;
  // Whether relays were given a part of the transfer.
  bool has_relayed() const noexcept;
  // Copies whole pieces from byte `begin` on, until they have `bytes` bytes or more. Returns where
  // they end. start: an event on streams.copies, after which relays start. A load starts after the
  // work in streams.copies so far and ends on streams.kernels, a store the other way round, but for
  // what relays store: see order_after_relays().
  uint64_t copy(const PagedCopy& copy, const PackTable& table, uint64_t begin, uint64_t bytes,
                cuda::Event start, const BatchOptions& options);

  // Makes streams.copies wait for what relays were given of the transfer.
  void order_after_relays() const;

  // Blocks until all that was given to the streams of all links has run. False when a GPU is lost.
  bool wait_for_relays() const noexcept;
  bool relays_are_alive() const noexcept;
  // Whether relays have left nothing to be done on this GPU.
  bool hops_are_drained() const noexcept;
  // Forgets all pieces, also those of a copy that failed halfway. None runs any more.
  void forget() noexcept;
  // How many events exist. Any thread may call.
  size_t num_events() const;

 private:
  // A part of a copy that passes through the ring.
  struct Piece {
    const PagedCopy& copy;
    const PackTable& table;
    uint64_t begin, end;

    uint64_t bytes() const { return end - begin; }
    void pack(cuda::Address packed, const cuda::StreamRef& stream) const {
      table.pack(copy, begin, end, packed, stream.handle);
    }
    FragmentList fragments(cuda::Address packed) const {
      return table.packing.page_fragments(copy, begin, end, packed);
    }
  };
  // Whether relays take part in the copy of a group. bytes: of the group in the transfer.
  bool uses_relays(uint64_t bytes, const Packing& packing, uint64_t block_bytes) const;
  // The largest piece of such a copy, unless a block is larger: each link gets at least four.
  uint64_t max_relayed_piece(uint64_t bytes) const {
    const size_t links = 1 + relays_.size();
    return std::min(max_relayed_piece_bytes(staging_bytes(), links), bytes / 4 / links);
  }
  uint64_t staging_bytes() const { return 4 * ring_.half(); }  // of both directions
  // The relay that was given least of the transfer, or null if the own link was.
  Relay* next_relay() noexcept;
  void load(const Piece& piece, Relay* relay, const BatchOptions& options);
  void store(const Piece& piece, Relay* relay, const BatchOptions& options);

  const StagedStreams streams_;
  const bool to_host_;
  StagingRing ring_;
  std::deque<Relay> relays_;
  uint64_t given_ = 0;  // bytes of the transfer, to the own link
};

}  // namespace kvswap
