#include "copy/exchange_rings.h"

#include <algorithm>
#include <utility>

#include "copy/staged_piece.h"
#include "cuda/context.h"

namespace kvswap {
namespace {

cuda::Address allocate_ring(int device, uint64_t bytes) {
  cuda::Address address = 0;
  KVSWAP_DRIVER_CHECK(cuda::driver().allocate(&address, bytes), "cuMemAlloc", " of ", bytes,
                      " bytes on CUDA device ", device, " for the exchange with other ranks");
  return address;
}

}  // namespace

ExchangeRings::ExchangeRings(std::shared_ptr<Exchange> exchange, const cuda::StreamRef& copies,
                             const cuda::StreamRef& kernels, uint64_t place_bytes)
    : exchange_(std::move(exchange)),
      copies_(copies),
      kernels_(kernels),
      place_bytes_(place_bytes),
      address_(allocate_ring(copies.device, kPlaces * place_bytes)),
      ring_(copies.device, address_, kPlaces * place_bytes),
      rings_(exchange_->ranks()) {
  ring_.add_filler(copies_);
  cuda::MemoryHandle handle;
  const cuda::Result result = cuda::driver().share_memory(&handle, address_);
  if (result != cuda::kSuccess) cuda::driver().free(address_);
  KVSWAP_DRIVER_CHECK(result, "cuIpcGetMemHandle");
  std::copy(std::begin(handle.bytes), std::end(handle.bytes), handle_.begin());
}

ExchangeRings::~ExchangeRings() {
  // A ring that is still read stays allocated until the process ends.
  if (!exchange_->leave()) return;
  for (const cuda::Address ring : rings_)
    if (ring != 0) cuda::driver().close_memory(ring);
  cuda::driver().free(address_);
}

bool ExchangeRings::join(uint64_t description) {
  return exchange_->join(handle_, description, [this] { open(); });
}

void ExchangeRings::open() {
  for (int rank = 0; rank < exchange_->ranks(); ++rank) {
    if (rank == exchange_->rank()) continue;
    const Exchange::RingHandle ring = exchange_->ring_of(rank);
    cuda::MemoryHandle handle;
    std::copy(ring.begin(), ring.end(), handle.bytes);
    KVSWAP_DRIVER_CHECK(cuda::driver().open_memory(&rings_[rank], handle, cuda::kOpenWithAccess),
                        "cuIpcOpenMemHandle", " of rank ", rank,
                        ", whose GPU this one must see and access");
  }
}

uint64_t ExchangeRings::begin(uint64_t contents, cuda::Event start) {
  const uint64_t load = exchange_->begin(contents);
  loads_ = load + 1;
  write(copies_, Exchange::kStarted, loads_);
  cuda::wait_event(kernels_, start);
  return load;
}

uint64_t ExchangeRings::load(const PagedCopy& copy, const PackTable& table, uint64_t begin,
                             uint64_t bytes, const BatchOptions& options) {
  const Packing& packing = table.packing;
  const uint64_t block_bytes = packing.packed_bytes(copy.slabs);
  const uint64_t all = copy.count * block_bytes, first_byte = begin;
  const uint64_t unit = piece_unit(block_bytes, place_bytes_, packing.is_divisible());
  const int ranks = exchange_->ranks();
  const uint64_t most = std::min(place_bytes_, all / ranks / kMinExchangedPieces);
  const uint64_t in_piece = std::max(unit, most / unit * unit);
  for (; begin < all && begin - first_byte < bytes; ++next_) {
    const uint64_t end = std::min(begin + in_piece, all);
    const int owner = static_cast<int>(next_ % ranks);
    if (owner == exchange_->rank()) {
      load_own(copy, table, begin, end, options);
    } else {
      wait(kernels_, owner, Exchange::kFilled, next_ + 1);
      const uint64_t place = next_ / ranks % kPlaces;
      table.pack(copy, begin, end, rings_[owner] + place * place_bytes_, kernels_.handle);
      bytes_ += end - begin;
    }
    write(kernels_, Exchange::kConsumed, next_ + 1);
    begin = end;
  }
  return begin;
}

void ExchangeRings::load_own(const PagedCopy& copy, const PackTable& table, uint64_t begin,
                             uint64_t end, const BatchOptions& options) {
  const StagingRing::Piece& place = ring_.allocate(place_bytes_);
  const uint64_t in_ring = kPlaces * exchange_->ranks();
  for (int other = 0; other < exchange_->ranks() && next_ >= in_ring; ++other) {
    if (other == exchange_->rank()) continue;
    wait(copies_, other, Exchange::kConsumed, next_ - in_ring + 1);
  }
  copy_batch(table.packing.page_fragments(copy, begin, end, place.address), copies_, options);
  write(copies_, Exchange::kFilled, next_ + 1);
  cuda::record_event(place.filled, copies_);
  cuda::wait_event(kernels_, place.filled);
  table.pack(copy, begin, end, place.address, kernels_.handle);
  cuda::record_event(place.drained, kernels_);
}

void ExchangeRings::end() { write(kernels_, Exchange::kDone, loads_); }

void ExchangeRings::forget() noexcept {
  ring_.forget();
  exchange_->settle();
}

void ExchangeRings::write(const cuda::StreamRef& stream, Exchange::Word word,
                          uint64_t value) const {
  const uint64_t address = exchange_->word(exchange_->rank(), word);
  KVSWAP_DRIVER_CHECK(cuda::driver().write_value(stream.handle, address, value, 0),
                      "cuStreamWriteValue64");
}

void ExchangeRings::wait(const cuda::StreamRef& stream, int rank, Exchange::Word word,
                         uint64_t value) const {
  const uint64_t address = exchange_->word(rank, word);
  KVSWAP_DRIVER_CHECK(
      cuda::driver().wait_value(stream.handle, address, value, cuda::kWaitUntilAtLeast),
      "cuStreamWaitValue64");
}

}  // namespace kvswap
