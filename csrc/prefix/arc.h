#pragma once

#include "prefix/eviction.h"

namespace kvswap::prefix {

// The adaptive replacement cache of Megiddo and Modha (FAST 2003), figure 4. It has two sides:
// recent, pages that were stored once, and frequent, pages that were used since, or evicted and
// stored again. Each side remembers keys that were evicted from it, its ghosts. When a ghost is
// stored again, its side gets more room, and its page is frequent. sizes_ counts held pages too. If
// all pages of the side that should give one are held, the other side gives it.
class Arc final : public EvictionPolicy {
 public:
  explicit Arc(std::vector<Node>& nodes);

  Admission admit(const Key& key) override;
  uint32_t evict(const Admission& admission) override;

 private:
  enum Side : uint8_t { kRecent = 0, kFrequent = 1 };
  void drop_ghost(uint32_t ghost);
  void add_ghost(const Key& key, uint8_t side);

  double target_ = 0;  // how many pages the recent side should have
  Table ghost_keys_;   // node g is ghost g; as many as there are pages
  List ghosts_[2], free_ghosts_;
};

}  // namespace kvswap::prefix
