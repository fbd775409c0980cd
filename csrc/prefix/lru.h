#pragma once

#include "prefix/eviction.h"

namespace kvswap::prefix {

// Evicts the page that has been idle for longest.
class Lru final : public EvictionPolicy {
 public:
  explicit Lru(Table& table) : table_(table) {}

  Admission admit(const Digest&) override { return {}; }
  uint32_t evict(const Admission&) override {
    const uint32_t page = idle_.take_oldest(table_.nodes);
    table_.erase(page);
    return page;
  }
  void add_page(const Admission&) override {}
  void forget(uint32_t page) override { table_.erase(page); }
  void add_idle(uint32_t page) override { idle_.append(table_.nodes, page); }
  void remove_idle(uint32_t page) override { idle_.remove(table_.nodes, page); }
  void move_idle(uint32_t page, uint32_t newer) override {
    idle_.move_before(table_.nodes, page, newer);
  }
  size_t num_idle() const override { return idle_.size(); }
  void use(uint32_t) override {}
  void grow(size_t) override {}

 private:
  Table& table_;
  List idle_;
};

}  // namespace kvswap::prefix
