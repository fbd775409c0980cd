#include <algorithm>

#include "check.h"
#include "prefix/manager.h"

namespace kvswap::blocks {
namespace {

constexpr size_t kAtOnce = 64;

}  // namespace

size_t Manager::total(const Keys& keys) const {
  size_t sum = 0;
  for (size_t g = 0; g < groups_.size(); ++g) sum += static_cast<size_t>(keys.counts[g]);
  return sum;
}

void Manager::find(const Keys& keys, bool all) {
  found_.resize(total(keys));
  size_t at = 0;
  for (size_t g = 0; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
    const auto count = static_cast<size_t>(keys.counts[g]);
    size_t step = all || group.options.window > 0 ? count : 1;  // most misses are at the front
    for (size_t start = 0; start < count;) {
      const size_t size = std::min(step, count - start);
      uint32_t* found = found_.data() + at + start;
      group.pages->find_all(keys.digests + (at + start) * kDigestBytes, size, found);
      if (size < count && std::find(found, found + size, kNone) != found + size) {
        std::fill(found + size, found_.data() + at + count, kNone);
        break;
      }
      start += size;
      step = kAtOnce;
    }
    at += count;
  }
}

std::pair<size_t, size_t> Manager::needed(const Group& group, int64_t units) const {
  const size_t end = static_cast<size_t>(units) * group.options.ratio;
  const size_t window = group.options.window;
  return {window == 0 || window > end ? 0 : end - window, end};
}

int64_t Manager::longest(const Keys& keys, bool ready) const {
  int64_t units = INT64_MAX;
  for (size_t g = 0; g < groups_.size(); ++g) {
    units = std::min(units, keys.counts[g] / static_cast<int64_t>(groups_[g].options.ratio));
  }
  // A prefix that lacks the block j of a group can only end before that block. Groups that need all
  // blocks are asked from the front, others from the back of the prefix, until none of them
  // objects.
  for (bool shorter = true; shorter && units > 0;) {
    shorter = false;
    size_t at = 0;
    for (size_t g = 0; g < groups_.size(); at += static_cast<size_t>(keys.counts[g++])) {
      const Group& group = groups_[g];
      const auto lacks = [&](size_t j) {
        return ready ? !group.pages->is_ready(found_[at + j]) : found_[at + j] == kNone;
      };
      auto [start, end] = needed(group, units);
      size_t missing = end;
      if (group.options.window == 0) {
        missing = start;
        while (missing < end && !lacks(missing)) ++missing;
      } else {
        while (missing > start && !lacks(missing - 1)) --missing;
        missing = missing == start ? end : missing - 1;
      }
      if (missing == end) continue;
      units = static_cast<int64_t>(missing / group.options.ratio);
      // A single group that needs all blocks has no more to say.
      shorter = group.options.window > 0 || groups_.size() > 1;
    }
  }
  return units;
}

Found Manager::lookup(const Keys& keys, bool again, bool wait) {
  const auto lock = enter(total(keys), wait);
  find(keys, false);
  Found found{longest(keys, false), longest(keys, true), 0};
  size_t at = 0;
  for (size_t g = 0; g < groups_.size(); at += static_cast<size_t>(keys.counts[g++])) {
    Group& group = groups_[g];
    const auto [start, end] = needed(group, found.found);
    int64_t pending = 0;
    for (size_t i = start; i < end; ++i) pending += !group.pages->is_ready(found_[at + i]);
    found.pending += pending;
    if (again) continue;
    const auto [first, last] = needed(group, found.ready);
    group.counters.asked += static_cast<uint64_t>(keys.counts[g]);
    group.counters.hits += last - first;
    group.counters.pending += static_cast<uint64_t>(pending);
  }
  if (asked_ && !again) {
    for (size_t i = 0; i < found_.size(); ++i) asked_->add(digest_at(keys.digests, i));
  }
  return found;
}

void Manager::check_distinct(const Keys& keys) {
  size_t at = 0;
  for (size_t g = 0; g < groups_.size(); at += static_cast<size_t>(keys.counts[g++])) {
    const auto count = static_cast<size_t>(keys.counts[g]);
    size_t slots = 2;
    while (slots < 2 * count) slots *= 2;
    seen_.assign(slots, kNone);
    for (size_t i = 0; i < count; ++i) {
      const Digest key = digest_at(keys.digests, at + i);
      size_t slot = groups_[g].pages->hash(key) & (slots - 1);
      for (; seen_[slot] != kNone; slot = (slot + 1) & (slots - 1)) {
        if (!(digest_at(keys.digests, at + seen_[slot]) == key)) continue;
        fail<ValueError>("keys[", i, "] is the same key as keys[", seen_[slot],
                         "]; name a block once");
      }
      seen_[slot] = static_cast<uint32_t>(i);
    }
  }
}

bool Manager::has_room(const Keys& keys, bool keep) {
  size_t at = 0;
  bool fits = true;
  for (size_t g = 0; g < groups_.size(); ++g) {
    Group& group = groups_[g];
    group.wanted.clear();
    size_t idle = group.pages->num_idle(), skipped = 0;
    for (int64_t i = 0; i < keys.counts[g]; ++i, ++at) {
      if (found_[at] != kNone) {
        idle -= group.pages->is_idle(found_[at]);  // what the job has already is not evicted for it
      } else if (!keep && asked_ && asked_->count(digest_at(keys.digests, at)) < store_threshold_) {
        ++skipped;
      } else {
        group.wanted.push_back(static_cast<uint32_t>(i));
      }
    }
    if (group.wanted.size() > group.pages->num_free() + idle) {
      ++group.counters.refused;
      fits = false;
    }
    group.counters.skipped += skipped;
  }
  return fits;
}

size_t Manager::take_events(Event* events, size_t capacity) {
  const std::lock_guard lock(mutex_);
  return events_.take(events, capacity);
}

void Manager::stats(size_t group, double now,
                    const std::function<void(const Counters&, const Pages&)>& read) {
  const std::lock_guard lock(mutex_);
  expire(now, true);
  read(groups_.at(group).counters, *groups_.at(group).pages);
}

}  // namespace kvswap::blocks
