#pragma once

#include "prefix/eviction.h"

namespace kvswap::prefix {

// Evicts the page that has been idle for longest.
class Lru final : public EvictionPolicy {
 public:
  using EvictionPolicy::EvictionPolicy;

  Admission admit(const Key&) override { return {}; }
  uint32_t evict(const Admission&) override { return take_oldest_idle(0); }
  void add_page(const Admission&) override {}
  void forget(uint32_t) override {}
  void use(uint32_t) override {}
  void grow(size_t) override {}
};

}  // namespace kvswap::prefix
