#include "copy/relay.h"

namespace kvswap {
namespace {

cuda::StreamRef create_stream(int device) {
  const cuda::ContextGuard context(device);
  return {device, cuda::create_stream()};
}

// Calls the driver for a stream in the context of its GPU. A lost one may refuse even that.
cuda::Result ask(const cuda::StreamRef& stream, cuda::Result (*call)(cuda::Stream)) noexcept {
  try {
    const cuda::ContextGuard context(stream.device);
    return call(stream.handle);
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
    ring_.add_filler(to_host ? hop_ : link_);
  } catch (...) {
    if (hop_.handle != nullptr) ask(hop_, cuda::driver().destroy_stream);
    ask(link_, cuda::driver().destroy_stream);
    throw;
  }
}

Relay::~Relay() {
  ask(link_, cuda::driver().destroy_stream);
  ask(hop_, cuda::driver().destroy_stream);
}

void Relay::start_after(cuda::Event event) { cuda::wait_event(link_, event); }

cuda::Event Relay::load(const FragmentsAt& fragments, uint64_t bytes, cuda::Address packed,
                        const BatchOptions& options) {
  const cuda::ContextGuard context(peer_);
  const StagingRing::Piece& piece = ring_.allocate(bytes);
  copy_batch(fragments(piece.address), link_, options);
  cuda::record_event(piece.filled, link_);
  cuda::wait_event(hop_, piece.filled);
  copy_between(packed, own_, piece.address, peer_, bytes);
  cuda::record_event(piece.drained, hop_);
  bytes_ += bytes;
  return piece.drained;
}

void Relay::store(const FragmentsAt& fragments, uint64_t bytes, cuda::Address packed,
                  cuda::Event filled, cuda::Event drained, const BatchOptions& options) {
  const StagingRing::Piece& piece = ring_.allocate(bytes);
  cuda::wait_event(hop_, filled);
  copy_between(piece.address, peer_, packed, own_, bytes);
  cuda::record_event(drained, hop_);
  const cuda::ContextGuard context(peer_);
  cuda::wait_event(link_, drained);
  copy_batch(fragments(piece.address), link_, options);
  cuda::record_event(piece.drained, link_);
  bytes_ += bytes;
}

void Relay::copy_between(cuda::Address dst, int dst_device, cuda::Address src, int src_device,
                         uint64_t bytes) const {
  KVSWAP_DRIVER_CHECK(
      cuda::driver().copy_peer_async(dst, cuda::primary_context(dst_device), src,
                                     cuda::primary_context(src_device), bytes, hop_.handle),
      "cuMemcpyPeerAsync", " from CUDA device ", src_device, " to ", dst_device, ", ", bytes,
      " bytes");
}

cuda::Result Relay::query_link() const noexcept { return ask(link_, cuda::driver().query_stream); }

cuda::Result Relay::query_hop() const noexcept { return ask(hop_, cuda::driver().query_stream); }

}  // namespace kvswap
