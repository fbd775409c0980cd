#pragma once

#include "prefix/eviction.h"

namespace kvswap::prefix {

// The adaptive replacement cache of Megiddo and Modha (FAST 2003): pages asked for once (recent)
// and used since (frequent) compete, and the keys that each side lost, its ghosts, say which of
// them should have more room. Held pages count in the sizes; where only they are left on the side
// that should give a page, the other one does. The nodes behind those of the pages are the ghosts.
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
