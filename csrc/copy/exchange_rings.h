#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "copy/batch.h"
#include "copy/exchange.h"
#include "copy/packing.h"
#include "copy/staging_ring.h"

namespace kvswap {

// The copies of an exchange on one rank: it fills its ring over its own link, and unpacks pieces
// from its ring and, over NVLink, from those of the other ranks. Piece n of all loads is that of
// rank n % N, in place n / N % kPlaces of its ring.
//
// One thread at a time, in the context of the rank's GPU.
class ExchangeRings {
 public:
  // Of a ring.
  static constexpr uint64_t kPlaces = 4;

  // copies, kernels: the streams of the channel's loads. place_bytes: a multiple of
  // kStagingAlignment.
  ExchangeRings(std::shared_ptr<Exchange> exchange, const cuda::StreamRef& copies,
                const cuda::StreamRef& kernels, uint64_t place_bytes);
  // Nothing of this rank runs any more, or its GPU is lost.
  ~ExchangeRings();
  ExchangeRings(const ExchangeRings&) = delete;
  ExchangeRings& operator=(const ExchangeRings&) = delete;

  // See Exchange.
  bool join(uint64_t description);

  // The loads that follow are one of the exchange, which starts after the event. Returns its
  // number. Throws if the exchange has ended.
  uint64_t begin(uint64_t contents, cuda::Event start);
  // Loads whole pieces from byte `begin` on, until they have `bytes` bytes or more. Returns where
  // they end. They start after the work in the stream of copies so far, and end on that of kernels.
  uint64_t load(const PagedCopy& copy, const PackTable& table, uint64_t begin, uint64_t bytes,
                const BatchOptions& options);
  // All of it was loaded.
  void end();
  // Forgets all pieces, also those of a load that failed halfway. None runs any more.
  void forget() noexcept;

  size_t num_events() const { return ring_.num_events(); }
  // That came from the other ranks so far. Any thread may call.
  uint64_t bytes() const { return bytes_; }

 private:
  void open();
  void load_own(const PagedCopy& copy, const PackTable& table, uint64_t begin, uint64_t end,
                const BatchOptions& options);
  void write(const cuda::StreamRef& stream, Exchange::Word word, uint64_t value) const;
  void wait(const cuda::StreamRef& stream, int rank, Exchange::Word word, uint64_t value) const;

  const std::shared_ptr<Exchange> exchange_;
  const cuda::StreamRef copies_, kernels_;
  const uint64_t place_bytes_;
  const cuda::Address address_;  // of the own ring
  Exchange::RingHandle handle_;  // of the own ring
  StagingRing ring_;
  std::vector<cuda::Address> rings_;  // by rank; 0: not open
  uint64_t next_ = 0;                 // the number of the next piece
  uint64_t loads_ = 0;                // that were begun
  std::atomic<uint64_t> bytes_{0};
};

}  // namespace kvswap
