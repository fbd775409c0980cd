#pragma once

#include "prefix/eviction.h"

namespace kvswap::prefix {

// The adaptive replacement cache of Megiddo and Modha (FAST 2003). Pages that were stored (recent)
// and pages that were used since (frequent) compete for room. The keys that each side has lost, its
// ghosts, say which side should have more. Held pages count in the sizes; if the side that should
// give a page has only held ones, the other side gives it. The nodes after those of the pages are
// ghosts.
class Arc final : public Policy {
 public:
  Arc(Table& table, size_t most_pages);

  Admission admit(const Digest& key) override;
  uint32_t evict(const Admission& admission) override;
  void enter(const Admission& admission) override { ++sizes_[admission.list]; }
  void leave(uint32_t page) override;
  void add_idle(uint32_t page) override;
  void remove_idle(uint32_t page) override;
  void move_idle(uint32_t page, uint32_t newer) override;
  size_t num_idle() const override { return idle_[kRecent].size() + idle_[kFrequent].size(); }
  void use(uint32_t page) override;
  void grow(size_t num_pages) override { num_pages_ = num_pages; }

 private:
  enum Side : uint8_t { kRecent = 0, kFrequent = 1 };
  void drop_ghost(uint32_t ghost);
  void add_ghost(uint32_t page, uint8_t side);

  Table& table_;
  size_t num_pages_ = 0;
  double target_ = 0;  // pages of the recent side
  size_t sizes_[2] = {0, 0};
  List idle_[2], ghosts_[2], free_ghosts_;
};

}  // namespace kvswap::prefix
