#pragma once

#include <atomic>
#include <functional>

#include "copy/batch.h"
#include "copy/staging_ring.h"

namespace kvswap {

// The link of another GPU, its peer, for staged copies in one direction: a piece passes through a
// ring on the peer, whose copy engine moves it between the host and the ring, while pieces before
// it are copied between the ring and the GPU of the cache. The peer launches no kernels.
//
// One thread at a time, in the context of the cache's GPU. The memory is the caller's.
class Relay {
 public:
  // The fragments between host pages and this address, which has the first byte of a piece.
  using FragmentsAt = std::function<FragmentList(cuda::Address)>;

  // own: the GPU of the cache. Peer access is enabled in both directions. ring: memory of the peer.
  Relay(int own, int peer, bool to_host, cuda::Address ring, uint64_t bytes);
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  int peer() const { return peer_; }
  // Between the GPUs; of the one that is the source.
  const cuda::StreamRef& hop() const { return hop_; }
  // From now on given() is of another transfer.
  void begin_transfer() noexcept { before_transfer_ = bytes_; }
  // Bytes of the transfer that the relay was given.
  uint64_t given() const { return bytes_ - before_transfer_; }
  // Of pieces; see StagingRing.
  uint64_t half() const { return ring_.half(); }
  uint64_t room_for(uint64_t unit) noexcept { return ring_.room_for(unit); }

  // The pieces that follow start after the event, which is of the cache's GPU.
  void start_after(cuda::Event event);
  // Loads a piece to `packed` on the cache's GPU. Returns the event of its arrival.
  cuda::Event load(const FragmentsAt& fragments, uint64_t bytes, cuda::Address packed,
                   const BatchOptions& options);
  // Stores a piece from `packed` on the cache's GPU, which is filled when the event `filled` has
  // happened. Records `drained`, also of that GPU, when it has left from there.
  void store(const FragmentsAt& fragments, uint64_t bytes, cuda::Address packed, cuda::Event filled,
             cuda::Event drained, const BatchOptions& options);

  // Makes a stream wait for all pieces so far.
  void order_before(const cuda::StreamRef& stream) const { ring_.order_before(stream); }
  // The states of the streams: the link's tells whether the peer still answers. Any thread may
  // call.
  cuda::Result query_link() const noexcept;
  cuda::Result query_hop() const noexcept;
  // Forgets all pieces, also those of a copy that failed halfway. None runs any more.
  void forget() noexcept { ring_.forget(); }

  size_t num_events() const { return ring_.num_events(); }
  // That were given to the relay so far. Any thread may call.
  uint64_t bytes() const { return bytes_; }

 private:
  void copy_between(cuda::Address dst, int dst_device, cuda::Address src, int src_device,
                    uint64_t bytes) const;

  const int own_, peer_;
  const bool to_host_;
  cuda::StreamRef link_{};  // of the peer: between the host and the ring
  cuda::StreamRef hop_{};   // see hop()
  StagingRing ring_;
  std::atomic<uint64_t> bytes_{0};
  uint64_t before_transfer_ = 0;  // of bytes_
};

}  // namespace kvswap
