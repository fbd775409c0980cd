#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "copy/staged_piece.h"

namespace kvswap {

// The agreement of ranks that load the same pages at the same time: processes of one engine on one
// machine, each with a GPU. Each rank loads every Nth piece of a load over its own link into a
// ring, and unpacks the other pieces from the rings of the other ranks (ExchangeRings).
//
// Words in pinned memory that all ranks share order the pieces. Streams write them and wait for
// them; the host does not wait. The wait of a stream has no timeout, so a thread of each rank
// watches the words. When no word has changed for the deadline, it ends the exchange for all ranks.
// Then the threads poison the words that the streams of their ranks wait for, which go on and may
// copy wrong bytes: loads that had not ended before fail, and no ring is used for another load.
//
// Any thread, unless a function says otherwise.
class Exchange {
 public:
  static constexpr int kMaxRanks = 8;
  static const size_t kBytes;                        // of the shared memory
  using RingHandle = std::array<unsigned char, 64>;  // the bytes of cuda::MemoryHandle

  // Why it has ended.
  enum End : uint64_t { kLeft = 1, kLate, kDifferent, kFailed };

  // What orders the pieces, which have numbers: of all loads, from 0 on. Of each rank:
  enum Word : int {
    kFilled,    // the number after that of the latest piece that is in its ring
    kConsumed,  // the number after that of the latest piece that it has unpacked
    kStarted,   // how many loads it has begun on the device
    kDone,      // how many have ended there
    kWords
  };

  // memory: kBytes, zeros at first, pinned, shared by all ranks. deadline: in seconds.
  Exchange(void* memory, int rank, int ranks, double deadline);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  // The address of a word, for streams.
  uint64_t word(int rank, Word word) const;

  // Takes the next step to join the other ranks. Returns whether all have joined; if not, call it
  // again. Throws if the exchange has ended meanwhile. One thread at a time.
  // - ring: of this rank.
  // - description: of the pages and of how they are cut. Equal in all ranks.
  // - open: makes the rings of the other ranks usable. Called once.
  bool join(const RingHandle& ring, uint64_t description, const std::function<void()>& open);
  RingHandle ring_of(int rank) const;
  bool is_open() const;

  // A load is about to be given to the streams. Throws if the exchange has ended. contents: a hash
  // of what is loaded, which the other ranks must load next, too. Returns the number of the load.
  uint64_t begin(uint64_t contents);
  // All loads that were begun have run, also one that was given to the streams in part.
  void settle();
  // Why the load, which has ended on the device, may be wrong, or "".
  std::string failure_of(uint64_t load);
  // Ends it for all ranks, if it has not ended.
  void end(End why) noexcept;
  // Ends it when the other ranks have what this one has loaded, or after the deadline. Then waits
  // up to a second for all streams. False if one, of this rank or of another, may still read a
  // ring.
  bool leave() noexcept;

 private:
  struct Rank;
  struct Memory;

  Rank& own() const;
  bool all_have_reached(uint64_t phase) const;
  std::string describe_end() const;
  void watch();
  void note_ends();
  void poison();
  bool rings_are_idle() const;

  Memory& memory_;
  const int rank_, ranks_;
  const double deadline_;
  std::mutex mutex_;  // the watching thread, and who notes ends
  std::condition_variable wake_;
  bool stopping_ = false;
  std::thread thread_;
};

// The least bytes of an exchanged load, and those of a place in a ring.
constexpr uint64_t min_exchanged_bytes(uint64_t staging_bytes) { return staging_bytes / 16; }
constexpr uint64_t exchanged_place_bytes(uint64_t staging_bytes) {
  return staging_bytes / 16 / kStagingAlignment * kStagingAlignment;
}

// Each rank has as many pieces of a part of a load, or more: the last ones are unpacked while no
// link works.
constexpr uint64_t kMinExchangedPieces = 4;

// For Exchange::begin() and join(): adds a number to a hash.
constexpr uint64_t mix_hash(uint64_t hash, uint64_t number) {
  hash = (hash ^ number) * 0x9e3779b97f4a7c15;
  return hash ^ hash >> 29;
}

}  // namespace kvswap
