#include "prefix/eviction.h"

#include "prefix/arc.h"
#include "prefix/lru.h"

namespace kvswap::prefix {

size_t num_nodes(EvictionPolicyKind kind, size_t num_pages) {
  return kind == EvictionPolicyKind::kArc ? 2 * num_pages : num_pages;
}

std::unique_ptr<EvictionPolicy> make_policy(EvictionPolicyKind kind, Table& table,
                                            size_t num_pages) {
  if (kind == EvictionPolicyKind::kArc) return std::make_unique<Arc>(table, num_pages);
  return std::make_unique<Lru>(table);
}

}  // namespace kvswap::prefix
