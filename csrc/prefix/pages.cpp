#include "prefix/pages.h"

#include <algorithm>

namespace kvswap::prefix {

Pages::Pages(size_t num_pages, EvictionPolicyKind kind, BelowPolicy below)
    : table_(num_pages),
      policy_(make_policy(kind, table_.nodes)),
      admissions_(num_pages),
      below_(below),
      due_(below == BelowPolicy::kNothing ? 0 : num_pages) {}

void Pages::grow(size_t ready_pages) {
  num_ready_pages_ = std::max(num_ready_pages_, ready_pages);
  policy_->grow(num_ready_pages_);
}

void Pages::take_over(const Pages& before) {
  grow(before.num_ready_pages_);
  num_evicted_ = before.num_evicted_;
  num_lost_ = before.num_lost_;
  for (uint32_t page = before.lent_.oldest(); page != kNone;) {
    hold_forgotten(page);
    lent_.append(table_.nodes, page);
    page = before.table_.nodes[page].after;
  }
}

void Pages::hold_forgotten(uint32_t page) {
  Node& node = table_.nodes[page];
  if (++node.count > 1) return;  // another reservation holds it, too
  set_state(page, PageState::kForgotten);
  ++num_forgotten_;
}

void Pages::hold(uint32_t page) {
  Node& node = table_.nodes[page];
  if (is_idle(page)) {
    policy_->remove_idle(page);
  } else if (node.is_suspended) {  // as if it were idle
    policy_->unplace(page);
  }
  node.is_suspended = false;
  ++node.count;
}

void Pages::hold_in_place(uint32_t page) {
  Node& node = table_.nodes[page];
  if (is_idle(page)) {
    policy_->suspend_idle(page);
    node.is_suspended = true;
  }
  ++node.count;
}

void Pages::release(uint32_t page) {
  Node& node = table_.nodes[page];
  if (--node.count > 0) return;
  node.is_suspended = false;
  if (state(page) == PageState::kForgotten) {
    free(page);
  } else {
    policy_->add_idle(page);
  }
}

void Pages::use(uint32_t page) {
  hold(page);
  policy_->unplace(page);
  policy_->use(page);
  release(page);
  if (below_ == BelowPolicy::kReused) make_due(page);
}

void Pages::order(const uint32_t* pages, size_t count) {
  uint32_t fronts[kMaxLists];
  std::fill(fronts, fronts + kMaxLists, kNone);
  for (size_t i = 0; i < count; ++i) {
    if (!has_key(pages[i])) continue;
    const Node& node = table_.nodes[pages[i]];
    uint32_t& front = fronts[node.list];
    if (front == kNone ? !node.has_place : front != pages[i]) policy_->place(pages[i], front);
    front = pages[i];
  }
}

size_t Pages::assign(const uint8_t* keys, const int64_t* key_indices, size_t count, int64_t* pages,
                     int64_t* evicted) {
  size_t num_evicted = 0;
  for (size_t i = 0; i < count; ++i) {
    admissions_[i] = policy_->admit(key_at(keys, static_cast<size_t>(key_indices[i])));
    if (num_free() > 0) {
      pages[i] = take_free();
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
    set_state(page, PageState::kFilling);
  }
  return num_evicted;
}

uint32_t Pages::evict(const Admission& admission) {
  const uint32_t page = policy_->evict(admission);
  table_.erase(page);
  uint8_t& below = table_.nodes[page].below;
  num_lost_ += (below & kDue) != 0;
  below &= kQueued;
  ++num_evicted_;
  return page;
}

uint32_t Pages::lend() {
  const uint32_t page = num_free() > 0 ? take_free() : evict({});
  table_.nodes[page].count = 1;
  set_state(page, PageState::kForgotten);
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
  set_state(page, PageState::kFilling);
  mark_filled(page, false);
  release(page);
  return true;
}

bool Pages::mark_filled(uint32_t page, bool was_read) {
  if (state(page) != PageState::kFilling) return false;
  set_state(page, PageState::kFilled);
  if (was_read) {
    table_.nodes[page].below |= kWasRead;
  } else if (below_ == BelowPolicy::kAll) {
    make_due(page);
  }
  return true;
}

void Pages::forget(uint32_t page) {
  if (state(page) == PageState::kFree || state(page) == PageState::kForgotten) return;
  is_idle(page) ? policy_->remove_idle(page) : policy_->unplace(page);
  policy_->forget(page);
  table_.erase(page);
  set_state(page, PageState::kForgotten);
  table_.nodes[page].below &= kQueued;
  if (table_.nodes[page].count == 0) free(page);
}

void Pages::make_due(uint32_t page) {
  uint8_t& below = table_.nodes[page].below;
  if ((below & (kDue | kWriting | kIsBelow | kWasRead)) != 0) return;
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
    node.below = kWriting;
    hold_in_place(page);
    pages.push_back(page);
  }
}

void Pages::end_write(uint32_t page, bool is_below) {
  if (!is_filled(page)) return;  // forgotten meanwhile
  table_.nodes[page].below = is_below ? kIsBelow : 0;
  if (!is_below) make_due(page);
}

void Pages::set_state(uint32_t page, PageState state) {
  uint8_t& now = table_.nodes[page].state;
  num_filling_ -= now == static_cast<uint8_t>(PageState::kFilling);
  now = static_cast<uint8_t>(state);
  num_filling_ += state == PageState::kFilling;
}

uint32_t Pages::take_free() {
  while (num_tried_ < num_ready_pages_) {
    const auto page = static_cast<uint32_t>(num_tried_++);
    if (state(page) == PageState::kFree) return page;
    --num_forgotten_;  // goes to free_ when it is released
  }
  return free_.take_oldest(table_.nodes);
}

void Pages::free(uint32_t page) {
  set_state(page, PageState::kFree);
  if (page < num_tried_) {
    free_.append(table_.nodes, page);
  } else {
    --num_forgotten_;  // take_free() comes to it
  }
}

}  // namespace kvswap::prefix
