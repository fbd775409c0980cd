#include "prefix/pages.h"

#include <algorithm>

#include "prefix/arc.h"
#include "prefix/lru.h"

namespace kvswap::prefix {
namespace {

// nodes: one for each page.
std::unique_ptr<EvictionPolicy> make_policy(EvictionPolicyKind kind, std::vector<Node>& nodes) {
  if (kind == EvictionPolicyKind::kArc) return std::make_unique<Arc>(nodes);
  return std::make_unique<Lru>(nodes);
}

}  // namespace

Pages::Pages(size_t num_pages, EvictionPolicyKind kind, BelowPolicy below)
    : table_(num_pages),
      policy_(make_policy(kind, table_.nodes)),
      admissions_(num_pages),
      below_(below),
      due_(below == BelowPolicy::kNothing ? 0 : num_pages) {}

void Pages::grow(size_t ready_pages) {
  for (; num_ready_pages_ < ready_pages; ++num_ready_pages_) {
    free_.append(table_.nodes, static_cast<uint32_t>(num_ready_pages_));
  }
  policy_->grow(num_ready_pages_);
}

void Pages::take_over(const Pages& before) {
  grow(before.num_ready_pages_);
  num_evicted_ = before.num_evicted_;
  num_lost_ = before.num_lost_;
  for (uint32_t page = 0; page < num_ready_pages_; ++page) {
    const uint32_t count = before.table_.nodes[page].count;
    if (count == 0) continue;
    free_.remove(table_.nodes, page);
    table_.nodes[page].count = count;
  }
  for (uint32_t page = before.lent_.oldest(); page != kNone;) {
    lent_.append(table_.nodes, page);
    page = before.table_.nodes[page].after;
  }
}

void Pages::release(uint32_t page) {
  Node& node = table_.nodes[page];
  if (node.state != PageState::kEmpty) {
    policy_->release(page);
  } else if (--node.count == 0) {
    free_.append(table_.nodes, page);
  }
}

void Pages::use(uint32_t page) {
  policy_->hold(page);
  policy_->use(page);
  policy_->release(page);
  if (below_ == BelowPolicy::kReused) make_due(page);
}

void Pages::order(const uint32_t* pages, size_t count) {
  uint32_t fronts[kMaxLists];
  std::fill(fronts, fronts + kMaxLists, kNone);
  for (size_t i = 0; i < count; ++i) {
    if (pages[i] == kNone) continue;
    const Node& node = table_.nodes[pages[i]];
    uint32_t& front = fronts[node.list];
    const bool is_placed = front == kNone ? node.has_place : front == pages[i];
    if (!is_placed) policy_->place(pages[i], front);
    front = pages[i];
  }
}

size_t Pages::assign(const uint8_t* keys, const int64_t* key_indices, size_t count, int64_t* pages,
                     int64_t* evicted) {
  size_t num_evicted = 0;
  for (size_t i = 0; i < count; ++i) {
    admissions_[i] = policy_->admit(key_at(keys, static_cast<size_t>(key_indices[i])));
    if (num_free() > 0) {
      pages[i] = free_.take_oldest(table_.nodes);
    } else {
      evicted[num_evicted++] = pages[i] = evict(admissions_[i]);
    }
    policy_->add_page(admissions_[i]);
  }
  std::reverse(pages, pages + count);  // a prompt is evicted from its end, so they may ascend now
  if (!std::is_sorted(pages, pages + count)) std::sort(pages, pages + count);
  for (size_t i = 0; i < count; ++i) {
    const auto page = static_cast<uint32_t>(pages[i]);
    table_.insert(page, key_at(keys, static_cast<size_t>(key_indices[i])));
    Node& node = table_.nodes[page];
    node.count = 1;
    node.list = admissions_[i].list;
    node.state = PageState::kFilling;
  }
  num_filling_ += count;
  return num_evicted;
}

uint32_t Pages::evict(const Admission& admission) {
  const uint32_t page = policy_->evict(admission);
  table_.erase(page);
  Node& node = table_.nodes[page];
  node.state = PageState::kEmpty;
  num_lost_ += (node.below & kDue) != 0;
  node.below &= kQueued;
  ++num_evicted_;
  return page;
}

uint32_t Pages::lend() {
  const uint32_t page = num_free() > 0 ? free_.take_oldest(table_.nodes) : evict({});
  table_.nodes[page].count = 1;
  lent_.append(table_.nodes, page);
  return page;
}

void Pages::take_back(uint32_t page) {
  lent_.remove(table_.nodes, page);
  release(page);
}

bool Pages::publish(uint32_t page, const Key& key) {
  if (table_.find(key) != kNone) {
    take_back(page);
    return false;
  }
  lent_.remove(table_.nodes, page);
  const Admission admission = policy_->admit(key);
  policy_->add_page(admission);
  table_.insert(page, key);
  table_.nodes[page].list = admission.list;
  table_.nodes[page].state = PageState::kFilling;
  ++num_filling_;
  mark_filled(page, false);
  release(page);
  return true;
}

bool Pages::mark_filled(uint32_t page, bool was_read) {
  Node& node = table_.nodes[page];
  if (node.state != PageState::kFilling) return false;
  node.state = PageState::kFilled;
  --num_filling_;
  if (was_read) {
    node.below |= kWasRead;
  } else if (below_ == BelowPolicy::kAll) {
    make_due(page);
  }
  return true;
}

void Pages::forget(uint32_t page) {
  Node& node = table_.nodes[page];
  if (node.state == PageState::kEmpty) return;
  policy_->forget(page);
  table_.erase(page);
  num_filling_ -= node.state == PageState::kFilling;
  node.state = PageState::kEmpty;
  node.below &= kQueued;
  if (node.count == 0) free_.append(table_.nodes, page);
}

void Pages::make_due(uint32_t page) {
  uint8_t& below = table_.nodes[page].below;
  if ((below & (kDue | kIsBelow | kWasRead)) != 0) return;
  below |= kDue;
  if ((below & kQueued) != 0) return;
  below |= kQueued;
  due_[(first_due_ + num_due_++) % due_.size()] = page;
}

void Pages::hold_due(size_t count, size_t visits, std::vector<uint32_t>& pages) {
  for (; visits > 0 && pages.size() < count && num_due_ > 0; --visits, --num_due_) {
    const uint32_t page = due_[first_due_];
    first_due_ = (first_due_ + 1) % due_.size();
    Node& node = table_.nodes[page];
    node.below &= static_cast<uint8_t>(~kQueued);
    if ((node.below & kDue) == 0) continue;  // it was evicted, or forgotten
    node.below = kIsBelow;
    hold_in_place(page);
    pages.push_back(page);
  }
}

void Pages::end_write(uint32_t page, bool is_below) {
  if (!is_filled(page)) return;  // forgotten meanwhile
  table_.nodes[page].below = is_below ? kIsBelow : 0;
  if (!is_below) make_due(page);
}

}  // namespace kvswap::prefix
