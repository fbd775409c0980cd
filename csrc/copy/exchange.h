#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "copy/packing.h"
#include "copy/staged_piece.h"

namespace kvswap {

struct BatchOptions;

// Loads of the same pages by several ranks: processes of one engine on one machine, each with a
// GPU. Piece n of all loads is that of rank n % N, which copies it over its own link into place
// n / N % kPlaces of its ring. All ranks unpack it from there, the others over NVLink.
//
// Words in pinned memory that all ranks share order this. Streams write them and wait for them; the
// host does not wait. The wait of a stream has no timeout, so a thread of each rank watches the
// words. When none has changed for the deadline, it ends the exchange for all ranks. Then the
// threads poison the words that streams wait for: those go on, and may copy wrong bytes. Loads that
// had not ended before fail, and the rings are never used again.
//
// Ranks may join again when all have left: that is another generation of the exchange.
class Exchange {
 public:
  static constexpr int kMaxRanks = 8;
  static const size_t kBytes;  // of the shared memory

  // Why it has ended.
  enum End : uint64_t { kLeft = 1, kLate, kDifferent, kFailed };

  // memory: kBytes, zeros at first, pinned, shared by all ranks. deadline: in seconds.
  Exchange(void* memory, int rank, int ranks, double deadline);
  ~Exchange() { close(); }
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // Joining and leaving. The scheduler's lock is held, and the context of the GPU is current.

  // Gives it the streams of a channel's loads, and memory of their GPU.
  void use_ring(int device, void* copies, void* kernels, uint64_t place_bytes);
  bool has_ring() const { return ring_ != 0; }
  // Joins the other ranks. False after `seconds`; to be called again then. Throws if the exchange
  // has ended meanwhile. description: of the pages and of how they are cut; equal in all ranks.
  bool join(uint64_t description, double seconds);
  // Ends it when the other ranks have what this one has loaded, or after the deadline. Returns
  // whether all memory was freed, or a rank still has it a second later; if not, call it again. All
  // loads of this rank have ended.
  bool leave() noexcept;
  // Nothing of this rank runs any more, or its GPU is lost.
  void close() noexcept;

  // Any thread.

  int ranks() const { return ranks_; }
  // Whether all have joined, and it has not ended.
  bool is_open() const { return has_joined_ && !has_ended(); }
  // Why the load, which has ended on the device, may be wrong, or "".
  std::string failure_of(uint64_t load);
  // Ends it for all ranks, if it has not ended.
  void end(End why) noexcept;
  // That came from the other ranks so far.
  uint64_t bytes() const { return bytes_; }

  // Loads: the thread that owns the channel, in the context of the GPU.

  // What is loaded until finish() is one load. It starts after the event, which is recorded in the
  // stream of copies, and ends in that of kernels. contents: a hash, equal in all ranks. Returns
  // the number of the load. Throws if the exchange has ended.
  uint64_t begin(uint64_t contents, void* start);
  // Loads whole pieces from byte `begin` on, until they have `bytes` bytes or more. Returns where
  // they end.
  uint64_t load(const PagedCopy& copy, const PackTable& table, uint64_t begin, uint64_t bytes,
                const BatchOptions& options);
  void finish();
  bool is_loading() const { return is_loading_; }
  // Instead of finish(), after a load that was given to the streams in part: all of it has run.
  void abandon() noexcept;

 private:
  struct Rank;
  struct Memory;
  enum Word : int;

  Rank& own() const;
  bool all(const std::function<bool(const Rank&)>& holds) const;
  bool has_ended() const;
  std::string describe_end() const;
  bool take_step(uint64_t description);
  void open_rings();
  void write(void* stream, Word word, uint64_t value) const;
  void wait(void* stream, int rank, Word word, uint64_t value) const;
  void watch();
  void note_ends();
  void release_rings(std::unique_lock<std::mutex>& lock);

  Memory& memory_;
  const int rank_, ranks_;
  const double deadline_;
  uint64_t generation_ = 0;  // 0 before it has joined
  std::atomic<bool> has_joined_{false};

  int device_ = 0;
  void *copies_ = nullptr, *kernels_ = nullptr;  // streams
  uint64_t place_bytes_ = 0;
  uint64_t ring_ = 0;            // an address, as all rings
  std::vector<uint64_t> rings_;  // by rank, with the own one; 0: not open
  uint64_t next_ = 0;            // the number of the next piece
  bool is_loading_ = false;
  std::atomic<uint64_t> bytes_{0};

  std::mutex mutex_;  // of what the watching thread shares with others
  std::condition_variable wake_;
  uint64_t begun_ = 0;  // loads
  bool stopping_ = false;
  std::atomic<bool> is_over_{true};  // the thread has nothing left to do
  double waiting_since_ = -1;        // to leave
  std::thread thread_;
};

// Of a place in a ring, and the least of an exchanged load.
constexpr uint64_t exchanged_place_bytes(uint64_t staging_bytes) {
  return staging_bytes / 16 / kStagingAlignment * kStagingAlignment;
}

// Each rank has this number of pieces of a part of a load, or more: the last ones are unpacked
// while no link works.
constexpr uint64_t kMinExchangedPieces = 4;

// For begin() and join(): adds a number to a hash.
constexpr uint64_t mix_hash(uint64_t hash, uint64_t number) {
  hash = (hash ^ number) * 0x9e3779b97f4a7c15;
  return hash ^ hash >> 29;
}

}  // namespace kvswap
