#include "prefix/eviction.h"

#include "prefix/arc.h"
#include "prefix/lru.h"

namespace kvswap::prefix {

std::unique_ptr<EvictionPolicy> make_policy(EvictionPolicyKind kind, std::vector<Node>& nodes) {
  if (kind == EvictionPolicyKind::kArc) return std::make_unique<Arc>(nodes);
  return std::make_unique<Lru>(nodes);
}

}  // namespace kvswap::prefix
