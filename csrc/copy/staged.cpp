#include "copy/staged.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "copy/staged_piece.h"

namespace kvswap {
namespace {

constexpr std::chrono::microseconds kPause{50};

}  // namespace

void StagingBuffer::add_relay(int peer, cuda::Address begin, uint64_t bytes) {
  relays_.emplace_back(streams_.copies.device, peer, to_host_, begin, bytes);
  if (to_host_) return;
  try {
    ring_.add_filler(relays_.back().hop());
  } catch (...) {
    relays_.pop_back();
    throw;
  }
}

void StagingBuffer::remove_relay(int peer) noexcept {
  if (relays_.empty() || relays_.back().peer() != peer) return;
  relays_.pop_back();
  if (!to_host_) ring_.remove_filler();
}

void StagingBuffer::begin_transfer() noexcept {
  given_ = 0;
  for (Relay& relay : relays_) relay.begin_transfer();
}

uint64_t StagingBuffer::copy(const PagedCopy& copy, const PackTable& table, uint64_t begin,
                             uint64_t bytes, cuda::Event start, const BatchOptions& options) {
  const Packing& packing = table.packing;
  const uint64_t block_bytes = packing.packed_bytes(copy.slabs);
  const uint64_t all = copy.count * block_bytes, first_byte = begin;
  const uint64_t in_transfer = copy.before + all + copy.after;
  const bool is_relayed = uses_relays(in_transfer, packing, block_bytes);
  const uint64_t half = is_relayed ? relays_.front().half() : ring_.half();
  const uint64_t unit = piece_unit(block_bytes, half, packing.is_divisible());
  if (is_relayed) {
    for (Relay& relay : relays_) relay.start_after(start);
  }
  while (begin < all && begin - first_byte < bytes) {
    const bool gives_all = bytes - (begin - first_byte) >= all - begin;
    // The first piece goes over the own link: what comes behind it in streams.kernels is then
    // behind all that streams.copies was given before, too.
    Relay* const relay = is_relayed && begin > 0 ? next_relay() : nullptr;
    uint64_t max_bytes = ring_.room_for(unit);
    if (relay != nullptr) max_bytes = std::min(max_bytes, relay->room_for(unit));
    if (is_relayed) max_bytes = std::min(max_bytes, max_relayed_piece(in_transfer));
    if (!gives_all) max_bytes = std::min(max_bytes, kMaxBegunPieceBytes);
    const uint64_t in_piece =
        piece_bytes(copy.before + begin, all - begin + copy.after, unit, max_bytes, to_host_);
    const Piece piece{copy, table, begin, std::min(begin + in_piece, all)};
    to_host_ ? store(piece, relay, options) : load(piece, relay, options);
    begin = piece.end;
  }
  return begin;
}

bool StagingBuffer::uses_relays(uint64_t bytes, const Packing& packing,
                                uint64_t block_bytes) const {
  if (relays_.empty() || bytes < min_relayed_bytes(staging_bytes())) return false;
  return packing.is_divisible() || block_bytes <= relays_.front().half();
}

bool StagingBuffer::has_relayed() const noexcept {
  return std::any_of(relays_.begin(), relays_.end(),
                     [](const Relay& relay) { return relay.given() > 0; });
}

Relay* StagingBuffer::next_relay() noexcept {
  Relay* next = nullptr;
  uint64_t least = given_;
  for (Relay& relay : relays_) {
    if (relay.given() >= least) continue;
    least = relay.given();
    next = &relay;
  }
  return next;
}

void StagingBuffer::load(const Piece& piece, Relay* relay, const BatchOptions& options) {
  const auto& [copies, kernels] = streams_;
  const StagingRing::Piece& place = ring_.allocate(piece.bytes());
  cuda::Event arrived = place.filled;
  if (relay == nullptr) {
    copy_batch(piece.fragments(place.address), copies, options);
    cuda::record_event(place.filled, copies);
    given_ += piece.bytes();
  } else {
    const auto fragments = [&](cuda::Address packed) { return piece.fragments(packed); };
    arrived = relay->load(fragments, piece.bytes(), place.address, options);
  }
  cuda::wait_event(kernels, arrived);
  piece.pack(place.address, kernels);
  cuda::record_event(place.drained, kernels);
}

void StagingBuffer::store(const Piece& piece, Relay* relay, const BatchOptions& options) {
  const auto& [copies, kernels] = streams_;
  const StagingRing::Piece& place = ring_.allocate(piece.bytes());
  piece.pack(place.address, kernels);
  cuda::record_event(place.filled, kernels);
  if (relay == nullptr) {
    cuda::wait_event(copies, place.filled);
    copy_batch(piece.fragments(place.address), copies, options);
    cuda::record_event(place.drained, copies);
    given_ += piece.bytes();
  } else {
    const auto fragments = [&](cuda::Address packed) { return piece.fragments(packed); };
    relay->store(fragments, piece.bytes(), place.address, place.filled, place.drained, options);
  }
}

void StagingBuffer::order_after_relays() const {
  for (const Relay& relay : relays_) {
    if (relay.given() > 0) relay.order_before(streams_.copies);
  }
}

bool StagingBuffer::relays_are_alive() const noexcept {
  return std::all_of(relays_.begin(), relays_.end(), [](const Relay& relay) {
    const cuda::Result state = relay.query_link();
    return state == cuda::kSuccess || state == cuda::kNotReady;
  });
}

bool StagingBuffer::hops_are_drained() const noexcept {
  return !to_host_ || std::all_of(relays_.begin(), relays_.end(), [](const Relay& relay) {
    return relay.query_hop() != cuda::kNotReady;
  });
}

// A stream that waits for an event of a lost GPU may wait for ever, and so would
// cuStreamSynchronize.
bool StagingBuffer::wait_for_relays() const noexcept {
  for (;; std::this_thread::sleep_for(kPause)) {
    bool is_over = true;
    const auto look = [&](cuda::Result state) {
      is_over &= state == cuda::kSuccess;
      return state == cuda::kSuccess || state == cuda::kNotReady;
    };
    for (const cuda::StreamRef& stream : {streams_.copies, streams_.kernels})
      if (!look(cuda::driver().query_stream(stream.handle))) return false;
    for (const Relay& relay : relays_)
      if (!look(relay.query_link()) || !look(relay.query_hop())) return false;
    if (is_over) return true;
  }
}

void StagingBuffer::forget() noexcept {
  ring_.forget();
  for (Relay& relay : relays_) relay.forget();
}

size_t StagingBuffer::num_events() const {
  size_t events = ring_.num_events();
  for (const Relay& relay : relays_) events += relay.num_events();
  return events;
}

}  // namespace kvswap
