#pragma once

#include "prefix/eviction.h"

namespace kvswap::prefix {

// Evicts the page that has been idle for longest.
class Lru final : public EvictionPolicy {
 public:
  explicit Lru(std::vector<Node>& nodes) : EvictionPolicy(nodes, 0) {}

  Admission admit(const Key&) override { return {}; }
  uint32_t evict(const Admission&) override { return take_oldest_idle(0); }
};

}  // namespace kvswap::prefix
