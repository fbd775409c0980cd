#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

#include "prefix/table.h"

namespace kvswap::prefix {

enum class BlockEventKind : int32_t { kStored = 0, kEvicted = 1, kCleared = 2, kLost = 3 };

struct BlockEvent {
  BlockEventKind kind;
  int32_t group;
  Digest key;
};

// A queue of events, of the kinds that the caller asked for. When it is full, all events are
// dropped and a kLost takes their place. Not thread safe: the manager's lock guards it.
class BlockEventQueue {
 public:
  // kinds: bit 1 << kind for each. Reserves room for kLimit events, so that record() cannot fail
  // and never moves them. The system backs this with memory only as events come.
  explicit BlockEventQueue(int32_t kinds) : kinds_(kinds) {
    if (kinds_ != 0) events_.reserve(kLimit);
  }

  void record(BlockEventKind kind, int32_t group, const Digest& key) noexcept {
    if ((kinds_ >> static_cast<int32_t>(kind) & 1) == 0) return;
    if (events_.size() == kLimit) drop_all();
    events_.push_back({kind, group, key});
  }

  // Takes the oldest events, up to `capacity`.
  size_t take(BlockEvent* events, size_t capacity) {
    size_t taken = 0;
    while (taken < capacity && taken_ < events_.size()) events[taken++] = events_[taken_++];
    if (taken_ == events_.size()) {
      events_.clear();
      taken_ = 0;
    }
    return taken;
  }

 private:
  static constexpr size_t kLimit = 1 << 20;

  void drop_all() noexcept {
    events_.clear();
    taken_ = 0;
    events_.push_back({BlockEventKind::kLost, -1, {}});
  }

  const int32_t kinds_;
  std::vector<BlockEvent> events_;
  size_t taken_ = 0;
};

}  // namespace kvswap::prefix
