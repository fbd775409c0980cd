#include "prefix/manager.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "check.h"

namespace kvswap::prefix {
namespace {

// Numbers of reservations, unique among all managers: none takes another's for its own.
int64_t next_id() {
  static std::atomic<int64_t> last{0};
  return ++last;
}

constexpr size_t kAtOnce = 64;

}  // namespace

BlockManager::~BlockManager() {
  while (reported_ != nullptr) delete std::exchange(reported_, reported_->next);
}

BlockManager::BlockManager(const std::vector<GroupOptions>& groups, const Options& options)
    : policy_(options.policy), below_(options.below), store_threshold_(options.store_threshold) {
  size_t num_pages = 0;
  for (const GroupOptions& group : groups) {
    groups_.push_back({group, nullptr, {}, {}});
    num_pages += group.num_pages;
  }
  for (size_t g = 0; g < groups_.size(); ++g) groups_[g].pages = make_pages(g);
  if (store_threshold_ > 1) lookups_.emplace(num_pages);
}

std::unique_ptr<Pages> BlockManager::make_pages(size_t group) {
  return std::make_unique<Pages>(groups_[group].options.num_pages, policy_, below_);
}

BlockManager::Lock BlockManager::lock() {
  Lock lock(mutex_);
  end_reported();
  return lock;
}

BlockManager::Lock BlockManager::try_lock(size_t visits) {
  Lock lock(mutex_, std::defer_lock);
  const bool is_short = visits <= kFewKeys && visits + ended_pages_->num_pages() <= kFewKeys;
  if (is_short && lock.try_lock()) end_reported();
  return lock;
}

void BlockManager::end_reported() {
  while (reported_ != nullptr || (reported_ = ended_pages_->take()) != nullptr) {
    end(*reported_);  // if there is no memory, a later call begins here
    delete std::exchange(reported_, reported_->next);
  }
}

std::vector<std::pair<uint32_t, Key>> BlockManager::take_corrupted() {
  return std::exchange(corrupted_, {});
}

void BlockManager::grow(const int64_t* ready_pages) {
  for (Group& group : groups_) group.pages->grow(static_cast<size_t>(*ready_pages++));
}

void BlockManager::hold(const GroupKeys* keys, bool all, Assigned& held, ReservedPages& made) {
  const size_t most = num_keys(keys);
  find_pages(keys, true);
  made.pins.reserve(most);
  held.key_indices.reserve(most);
  held.pages.reserve(most);
  held.counts.resize(groups_.size());
  for (uint32_t g = 0; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
    for (size_t i = 0; i < group.found.size(); ++i) {
      const uint32_t page = group.found[i];
      if (group.pages->is_filled(page)) {
        made.pins.push_back({g, page, Copy::kLoad});
        held.key_indices.push_back(static_cast<int64_t>(i));
        held.pages.push_back(page);
        ++held.counts[g];
      } else if (all) {
        return;
      }
    }
  }
  if (made.pins.empty() && !all) return;
  made.id = next_id();
  for (const Pin& pin : made.pins) {
    Pages& pages = *groups_[pin.group].pages;
    if (all) {
      pages.hold(pin.page);
      pages.use(pin.page);
    } else {
      pages.hold_in_place(pin.page);
    }
  }
}

bool BlockManager::prepare_store(const GroupKeys* keys, std::optional<uint64_t> promoted_after,
                                 Assigned& assigned, ReservedPages& made, ReservedPages* lease) {
  if (promoted_after && *promoted_after != resets_) return false;
  check_distinct(keys);
  find_pages(keys, true);
  const bool may_skip = lookups_ && !promoted_after && lease == nullptr;
  if (!find_wanted(keys, may_skip, assigned)) return false;
  // All memory is taken before anything is held or evicted.
  const size_t most = num_keys(keys), num_wanted = assigned.key_indices.size();
  assigned.pages.resize(num_wanted);
  assigned.evicted.resize(num_wanted);
  made.pins.reserve(most);
  if (lease != nullptr) lease->pins.reserve(most);
  const Copy copy = promoted_after ? Copy::kPromotion : Copy::kStore;
  size_t written = 0, num_evicted = 0;
  for (uint32_t g = 0; g < groups_.size(); ++g) {
    Pages& pages = *groups_[g].pages;
    std::vector<uint32_t>& found = groups_[g].found;
    const auto count = static_cast<size_t>(assigned.counts[g]);
    const int64_t* wanted = assigned.key_indices.data() + written;
    int64_t* given = assigned.pages.data() + written;
    bool keeps_place = false;
    for (const uint32_t page : found) {
      if (page != kNone) keeps_place |= pages.hold(page);
    }
    num_evicted +=
        pages.assign(keys[g].bytes, wanted, count, given, assigned.evicted.data() + num_evicted);
    for (size_t i = 0, next = 0; i < found.size(); ++i) {
      if (next < count && wanted[next] == static_cast<int64_t>(i)) {
        found[i] = static_cast<uint32_t>(given[next++]);
        made.pins.push_back({g, found[i], copy});
      } else if (found[i] != kNone) {
        made.pins.push_back({g, found[i], Copy::kNone});
      }
    }
    // Some are evicted from the places that they keep. The others get places beside these, so that
    // the prompt is evicted from its end.
    if (keeps_place) pages.order(found.data(), found.size());
    written += count;
  }
  assigned.evicted.resize(num_evicted);
  if (lease != nullptr) {
    for (const Pin& pin : made.pins) {
      groups_[pin.group].pages->hold(pin.page);
      lease->pins.push_back({pin.group, pin.page, Copy::kNone});
    }
    lease->id = next_id();
  }
  if (num_wanted > 0) {
    made.id = next_id();
  } else {
    release_all(made.pins);
  }
  return true;
}

void BlockManager::end(ReservedPages& of) {
  const bool is_lost = of.outcome == Outcome::kLost;
  const bool has_failed = is_lost || of.outcome == Outcome::kFailed;
  const bool notes = of.outcome == Outcome::kDamaged && below_ != BelowPolicy::kNothing;
  if (notes) corrupted_.reserve(corrupted_.size() + of.rejected.size());
  for (Pin& pin : of.pins) {
    if (pin.copy == Copy::kNone) continue;
    Group& group = groups_[pin.group];
    const bool is_rejected = !of.rejected.empty() &&
                             std::binary_search(of.rejected.begin(), of.rejected.end(),
                                                std::pair<uint32_t, int64_t>(pin.group, pin.page));
    if (pin.copy == Copy::kWrite) {
      group.pages->end_write(pin.page, !has_failed && !is_rejected);
    } else if (has_failed || is_rejected) {
      if (is_rejected && notes && group.pages->was_read(pin.page)) {
        corrupted_.emplace_back(pin.group, group.pages->key(pin.page));
      }
      forget(pin);
    } else if (pin.copy == Copy::kLoad) {
      ++group.counters.loaded;
    } else {
      const bool was_read = pin.copy == Copy::kPromotion;
      const bool is_filled = group.pages->mark_filled(pin.page, was_read);
      (was_read ? group.counters.promoted : group.counters.stored) += is_filled;
    }
  }
  if (!is_lost) release_all(of.pins);
  of.id = 0;
}

std::vector<int64_t> BlockManager::lend(size_t count) {
  Pages& pages = *groups_.front().pages;
  std::vector<int64_t> lent(std::min(count, pages.num_free() + pages.num_idle()));
  for (int64_t& page : lent) page = pages.lend();
  std::sort(lent.begin(), lent.end());  // neighbours are copied together
  return lent;
}

void BlockManager::take_back(const std::vector<int64_t>& pages, const uint8_t* keys) {
  Group& group = groups_.front();
  for (size_t i = pages.size(); i-- > 0;) {  // as in release_all()
    const auto page = static_cast<uint32_t>(pages[i]);
    if (keys == nullptr) {
      group.pages->take_back(page);
    } else {
      group.counters.stored += group.pages->publish(page, key_at(keys, i));
    }
  }
}

void BlockManager::abandon(ReservedPages& reservation) {
  for (Pin& pin : reservation.pins) {
    if (pin.copy != Copy::kNone) forget(pin);
  }
}

void BlockManager::forget(Pin& pin) {
  Group& group = groups_[pin.group];
  group.pages->forget(pin.page);
  ++group.counters.failed;
  pin.copy = Copy::kNone;  // its end counts it no more
}

Due BlockManager::hold_due(size_t count, size_t group, ReservedPages& made) {
  Due due;
  due.resets = resets_;
  std::vector<uint32_t> pages;
  pages.reserve(count);
  made.pins.reserve(count);
  due.pages.reserve(count);
  due.keys.reserve(count * kKeyBytes);
  groups_.at(group).pages->hold_due(count, kFewKeys, pages);
  for (const uint32_t page : pages) {
    const auto* key = reinterpret_cast<const uint8_t*>(&groups_[group].pages->key(page));
    due.keys.insert(due.keys.end(), key, key + kKeyBytes);
    due.pages.push_back(page);
    made.pins.push_back({static_cast<uint32_t>(group), page, Copy::kWrite});
  }
  if (!pages.empty()) made.id = next_id();
  return due;
}

void BlockManager::touch(const GroupKeys* keys) {
  find_pages(keys, true);
  // The first block is the last one used: without it no other block is of use.
  for (auto group = groups_.rbegin(); group != groups_.rend(); ++group) {
    for (size_t i = group->found.size(); i-- > 0;) {
      if (group->pages->is_filled(group->found[i])) group->pages->use(group->found[i]);
    }
  }
}

void BlockManager::order(const GroupKeys* keys, bool renew) {
  find_pages(keys, true);
  for (const Group& group : groups_) {
    const std::vector<uint32_t>& found = group.found;
    for (size_t i = renew ? found.size() : 0; i-- > 0;) {
      if (found[i] != kNone) group.pages->renew(found[i]);
    }
    if (!renew) group.pages->order(found.data(), found.size());
  }
}

void BlockManager::reset() {
  std::vector<size_t> num_ready;
  {
    const auto held = lock();
    for (const Group& group : groups_) num_ready.push_back(group.pages->num_ready_pages());
  }
  // New pages are made, and the old ones freed, while other calls go on.
  std::vector<std::unique_ptr<Pages>> pages;
  for (size_t g = 0; g < groups_.size(); ++g) {
    pages.push_back(make_pages(g));
    pages[g]->grow(num_ready[g]);
  }
  const auto held = lock();
  for (size_t g = 0; g < groups_.size(); ++g) {
    pages[g]->take_over(*groups_[g].pages);
    groups_[g].pages.swap(pages[g]);
  }
  ++resets_;
}

void BlockManager::release_all(const std::vector<Pin>& pins) {
  // The first block is released last, and so evicted last: without it no other block is of use.
  for (size_t i = pins.size(); i-- > 0;) {
    groups_[pins[i].group].pages->release(pins[i].page);
  }
}

size_t BlockManager::num_keys(const GroupKeys* keys) const {
  size_t sum = 0;
  for (size_t g = 0; g < groups_.size(); ++g) sum += keys[g].count;
  return sum;
}

void BlockManager::find_pages(const GroupKeys* keys, bool all) {
  for (size_t g = 0; g < groups_.size(); ++g) {
    Group& group = groups_[g];
    const size_t count = keys[g].count;
    group.found.resize(count);
    size_t step = all || group.options.window > 0 ? count : 1;  // most misses are at the front
    for (size_t start = 0; start < count;) {
      const size_t size = std::min(step, count - start);
      uint32_t* found = group.found.data() + start;
      group.pages->table().find_all(keys[g].bytes + start * kKeyBytes, size, found);
      if (size < count && std::find(found, found + size, kNone) != found + size) {
        std::fill(found + size, group.found.data() + count, kNone);
        break;
      }
      start += size;
      step = kAtOnce;
    }
  }
}

std::pair<size_t, size_t> BlockManager::needed_blocks(const Group& group, int64_t units) const {
  const size_t end = static_cast<size_t>(units) * group.options.ratio;
  const size_t window = group.options.window;
  return {window == 0 || window > end ? 0 : end - window, end};
}

template <class IsPresent>
int64_t BlockManager::longest_prefix(std::vector<size_t> ends, const IsPresent& is_present) const {
  // A group that needs all blocks limits the prefix to those before the first that is missing.
  int64_t units = INT64_MAX;
  for (size_t g = 0; g < groups_.size(); ++g) {
    if (groups_[g].options.window == 0) {
      size_t first_missing = 0;
      while (first_missing < ends[g] && is_present(g, first_missing)) ++first_missing;
      ends[g] = first_missing;
    }
    units = std::min(units, static_cast<int64_t>(ends[g] / groups_[g].options.ratio));
  }
  // The others are checked backwards from the end of the prefix, until none shortens it: if block j
  // of the window is missing, a prefix can only end before that block. No block is checked twice:
  // those from ends[g] to the end of the prefix are present.
  for (bool shorter = true; shorter && units > 0;) {
    shorter = false;
    for (size_t g = 0; g < groups_.size(); ++g) {
      const Group& group = groups_[g];
      if (group.options.window == 0) continue;
      const auto [start, end] = needed_blocks(group, units);
      size_t& from = ends[g];
      from = std::min(from, end);
      while (from > start && is_present(g, from - 1)) --from;
      if (from == start) continue;
      units = static_cast<int64_t>((from - 1) / group.options.ratio);
      shorter = true;
    }
  }
  return units;
}

int64_t BlockManager::longest_prefix(int64_t found, const std::vector<std::string>& there) const {
  std::vector<size_t> first, ends;
  for (size_t g = 0; g < groups_.size(); ++g) {
    first.push_back(static_cast<size_t>(found) * groups_[g].options.ratio);
    ends.push_back(first[g] + there[g].size());
  }
  return longest_prefix(std::move(ends), [&](size_t g, size_t i) {
    return i < first[g] || there[g][i - first[g]] != 0;
  });
}

Lookup BlockManager::lookup(const GroupKeys* keys, bool again, ReservedPages* lease) {
  find_pages(keys, false);
  std::vector<size_t> ends;
  for (const Group& group : groups_) ends.push_back(group.found.size());
  Lookup found{
      longest_prefix(ends, [&](size_t g, size_t i) { return groups_[g].found[i] != kNone; }),
      longest_prefix(
          std::move(ends),
          [&](size_t g, size_t i) { return groups_[g].pages->is_filled(groups_[g].found[i]); }),
      0};
  if (lease != nullptr && found.ready > 0) {
    for (uint32_t g = 0; g < groups_.size(); ++g) {
      const auto [first, last] = needed_blocks(groups_[g], found.ready);
      for (size_t i = first; i < last; ++i)
        lease->pins.push_back({g, groups_[g].found[i], Copy::kNone});
    }
    lease->id = next_id();
    for (const Pin& pin : lease->pins) groups_[pin.group].pages->hold_in_place(pin.page);
  }
  for (Group& group : groups_) {
    int64_t pending = 0;
    for (const uint32_t page : group.found) {
      if (page != kNone) {
        pending += !group.pages->is_filled(page);
      } else if (group.options.window == 0) {
        break;
      }
    }
    found.pending += pending;
    if (again) continue;
    const auto [first, last] = needed_blocks(group, found.ready);
    group.counters.asked += group.found.size();
    group.counters.hits += last - first;
    group.counters.pending += static_cast<uint64_t>(pending);
  }
  if (lookups_ && !again) {
    // The first key is counted last, and so forgotten last: a store that leaves out the first block
    // of a prompt must not store the others.
    for (size_t g = groups_.size(); g-- > 0;) {
      for (size_t i = keys[g].count; i-- > 0;) lookups_->add(key_at(keys[g].bytes, i));
    }
  }
  return found;
}

void BlockManager::check_distinct(const GroupKeys* keys) {
  for (size_t g = 0; g < groups_.size(); ++g) {
    const auto [bytes, count] = keys[g];
    size_t slots = 2;
    while (slots < 2 * count) slots *= 2;
    seen_.assign(slots, kNone);
    for (size_t i = 0; i < count; ++i) {
      const Key key = key_at(bytes, i);
      size_t slot = groups_[g].pages->table().hash(key) & (slots - 1);
      for (; seen_[slot] != kNone; slot = (slot + 1) & (slots - 1)) {
        if (!(key_at(bytes, seen_[slot]) == key)) continue;
        const std::string keys_name =
            groups_.size() == 1 ? "keys" : "keys[" + std::to_string(g) + "]";
        fail<ValueError>(keys_name, "[", i, "] is the same key as ", keys_name, "[", seen_[slot],
                         "]; name a block once");
      }
      seen_[slot] = static_cast<uint32_t>(i);
    }
  }
}

bool BlockManager::find_wanted(const GroupKeys* keys, bool may_skip, Assigned& wanted) {
  wanted.key_indices.reserve(num_keys(keys));
  wanted.counts.resize(groups_.size());
  bool fits = true;
  for (size_t g = 0; g < groups_.size(); ++g) {
    Group& group = groups_[g];
    size_t idle = group.pages->num_idle();
    const size_t before = wanted.key_indices.size();
    for (size_t i = 0; i < group.found.size(); ++i) {
      if (group.found[i] != kNone) {
        // A page that the reservation holds cannot be evicted for it.
        idle -= group.pages->is_idle(group.found[i]);
      } else if (may_skip && lookups_->count(key_at(keys[g].bytes, i)) < store_threshold_) {
        ++group.counters.skipped;
      } else {
        wanted.key_indices.push_back(static_cast<int64_t>(i));
      }
    }
    const size_t count = wanted.key_indices.size() - before;
    wanted.counts[g] = static_cast<int64_t>(count);
    if (count > group.pages->num_free() + idle) {
      ++group.counters.refused;
      fits = false;
    }
  }
  return fits;
}

std::vector<uint64_t> BlockManager::stats(size_t group) const {
  const Counters& of = groups_.at(group).counters;
  const Pages& pages = *groups_[group].pages;
  return {of.asked,
          of.hits,
          of.pending,
          of.stored,
          of.loaded,
          pages.num_evicted(),
          of.skipped,
          of.refused,
          of.failed,
          pages.num_ready_pages(),
          pages.num_free(),
          pages.num_idle(),
          pages.num_filling(),
          of.promoted,
          pages.num_lost()};
}

}  // namespace kvswap::prefix
