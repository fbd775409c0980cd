#include "copy/relay.h"

namespace kvswap {
namespace {

void record(cuda::Event event, cuda::Stream stream) {
  KVSWAP_DRIVER_CHECK(cuda::driver().record_event(event, stream), "cuEventRecord");
}

void wait(cuda::Stream stream, cuda::Event event) {
  KVSWAP_DRIVER_CHECK(cuda::driver().wait_event(stream, event, 0), "cuStreamWaitEvent");
}

cuda::Stream create_stream(int device) {
  const cuda::ContextGuard context(device);
  return cuda::create_stream();
}

// Calls the driver for a stream in the context of its GPU. A lost one may refuse even that.
cuda::Result ask(int device, cuda::Stream stream, cuda::Result (*call)(cuda::Stream)) noexcept {
  try {
    const cuda::ContextGuard context(device);
    return call(stream);
  } catch (const std::exception&) {
    return cuda::kNotInitialized;
  }
}

}  // namespace

Relay::Relay(int own, int peer, bool to_host, cuda::Address ring, uint64_t bytes)
    : own_(own), peer_(peer), to_host_(to_host), ring_(peer, ring, bytes) {
  link_ = create_stream(peer);
  try {
    hop_ = create_stream(to_host ? own : peer);
    ring_.add_filler(to_host ? hop() : cuda::StreamRef{peer, link_});
  } catch (...) {
    if (hop_ != nullptr) ask(hop().device, hop_, cuda::driver().destroy_stream);
    ask(peer, link_, cuda::driver().destroy_stream);
    throw;
  }
}

Relay::~Relay() {
  ask(peer_, link_, cuda::driver().destroy_stream);
  ask(hop().device, hop_, cuda::driver().destroy_stream);
}

void Relay::start_after(cuda::Event event) {
  const cuda::ContextGuard context(peer_);
  wait(link_, event);
}

cuda::Event Relay::load(const FragmentsAt& fragments, uint64_t bytes, cuda::Address packed,
                        const BatchOptions& options) {
  const cuda::ContextGuard context(peer_);
  const StagingRing::Piece& piece = ring_.allocate(bytes);
  copy_batch(fragments(piece.address), {peer_, link_}, options);
  record(piece.filled, link_);
  wait(hop_, piece.filled);
  copy_between(packed, own_, piece.address, peer_, bytes);
  record(piece.drained, hop_);
  bytes_ += bytes;
  return piece.drained;
}

void Relay::store(const FragmentsAt& fragments, uint64_t bytes, cuda::Address packed,
                  cuda::Event filled, cuda::Event drained, const BatchOptions& options) {
  const StagingRing::Piece& piece = ring_.allocate(bytes);
  wait(hop_, filled);
  copy_between(piece.address, peer_, packed, own_, bytes);
  record(drained, hop_);
  const cuda::ContextGuard context(peer_);
  wait(link_, drained);
  copy_batch(fragments(piece.address), {peer_, link_}, options);
  record(piece.drained, link_);
  bytes_ += bytes;
}

void Relay::copy_between(cuda::Address dst, int dst_device, cuda::Address src, int src_device,
                         uint64_t bytes) const {
  KVSWAP_DRIVER_CHECK(
      cuda::driver().copy_peer_async(dst, cuda::primary_context(dst_device), src,
                                     cuda::primary_context(src_device), bytes, hop_),
      "cuMemcpyPeerAsync", " from CUDA device ", src_device, " to ", dst_device, ", ", bytes,
      " bytes");
}

cuda::Result Relay::query_link() const noexcept {
  return ask(peer_, link_, cuda::driver().query_stream);
}

cuda::Result Relay::query_hop() const noexcept {
  return ask(hop().device, hop_, cuda::driver().query_stream);
}

}  // namespace kvswap
