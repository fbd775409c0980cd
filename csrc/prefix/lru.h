#pragma once

#include "prefix/eviction.h"

namespace kvswap::prefix {

// Evicts the page that has been idle for longest.
class Lru final : public EvictionPolicy {
 public:
  explicit Lru(Table& table) : table_(table) {}

  Admission admit(const Digest&) override { return {}; }
  uint32_t evict(const Admission&) override {
    const uint32_t page = order_.take_oldest(table_.nodes);
    table_.erase(page);
    return page;
  }
  void add_page(const Admission&) override {}
  void forget(uint32_t page) override { table_.erase(page); }
  void add_idle(uint32_t page) override { order_.add_idle(table_.nodes, page); }
  void remove_idle(uint32_t page) override { order_.remove_idle(table_.nodes, page); }
  void suspend_idle(uint32_t) override { order_.suspend_idle(); }
  void place(uint32_t page, uint32_t newer) override { order_.place(table_.nodes, page, newer); }
  void unplace(uint32_t page) override { order_.unplace(table_.nodes, page); }
  size_t num_idle() const override { return order_.num_idle(); }
  void use(uint32_t) override {}
  void grow(size_t) override {}

 private:
  Table& table_;
  EvictionOrder order_;
};

}  // namespace kvswap::prefix
