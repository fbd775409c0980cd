#include "prefix/manager.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "check.h"

namespace kvswap::blocks {
namespace {

// Of all managers, so that none takes a job or a lease of another one for its own.
int64_t next_id() {
  static std::atomic<int64_t> last{0};
  return ++last;
}

}  // namespace

Manager::Manager(const std::vector<GroupOptions>& groups, const Options& options)
    : events_(options.events), policy_(options.policy), store_threshold_(options.store_threshold) {
  for (const GroupOptions& group : groups) groups_.push_back({group, nullptr, {}, {}});
  for (size_t g = 0; g < groups_.size(); ++g) groups_[g].pages = make_pages(g);
  if (store_threshold_ > 1) asked_.emplace(options.asked_capacity);
}

std::unique_ptr<Pages> Manager::make_pages(size_t group) {
  const size_t num_pages = groups_[group].options.num_pages;
  return std::make_unique<Pages>(static_cast<int32_t>(group), num_pages, policy_, events_);
}

std::unique_lock<std::mutex> Manager::enter(size_t visits, bool wait) {
  if (wait) return std::unique_lock(mutex_);
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (visits > kFewKeys || !lock) throw Busy{};
  return lock;
}

void Manager::grow(const int64_t* ready_pages) {
  const std::lock_guard lock(mutex_);
  for (Group& group : groups_) group.pages->grow(static_cast<size_t>(*ready_pages++));
}

int64_t Manager::prepare_load(const Keys& keys, int64_t* pages, bool wait) {
  const auto lock = enter(total(keys), wait);
  find(keys, true);
  Job job{false, {}};
  job.pins.reserve(found_.size());
  size_t at = 0;
  for (uint32_t g = 0; g < groups_.size(); ++g) {
    for (int64_t i = 0; i < keys.counts[g]; ++i, ++at) {
      if (!groups_[g].pages->is_ready(found_[at])) return 0;
      pages[at] = found_[at];
      job.pins.push_back({g, found_[at], false});
    }
  }
  const int64_t id = next_id();
  const Job& kept = jobs_.emplace(id, std::move(job)).first->second;
  for (const Pin& pin : kept.pins) {
    groups_[pin.group].pages->hold(pin.page);
    groups_[pin.group].pages->use(pin.page);
  }
  return id;
}

std::optional<Stored> Manager::prepare_store(const Keys& keys, double now, bool keep,
                                             int64_t* places, int64_t* pages, int64_t* counts,
                                             bool wait) {
  const auto lock = enter(total(keys), wait);
  expire(now, wait);
  check_distinct(keys);
  find(keys, true);
  if (!has_room(keys, keep)) return std::nullopt;
  // All memory is taken before anything is held or evicted.
  placed_.resize(found_.size());
  std::vector<Pin> pins, kept;
  pins.reserve(found_.size());
  if (keep) kept.reserve(found_.size());
  const Stored stored{next_id(), keep ? next_id() : 0};
  const auto job = jobs_.emplace(stored.job, Job{true, {}}).first;
  try {
    if (keep) leases_.emplace(stored.lease, std::vector<Pin>());
  } catch (...) {
    jobs_.erase(job);
    throw;
  }
  size_t at = 0, written = 0;
  for (uint32_t g = 0; g < groups_.size(); at += keys.counts[g++]) {
    Group& group = groups_[g];
    uint32_t* found = found_.data() + at;
    for (int64_t i = 0; i < keys.counts[g]; ++i) {
      if (found[i] != kNone) group.pages->hold(found[i]);
    }
    group.pages->place(keys.digests + at * kDigestBytes, group.wanted, placed_.data());
    for (size_t i = 0; i < group.wanted.size(); ++i, ++written) {
      places[written] = group.wanted[i];
      pages[written] = found[group.wanted[i]] = placed_[i];
    }
    counts[g] = static_cast<int64_t>(group.wanted.size());
    auto next = group.wanted.begin();
    for (int64_t i = 0; i < keys.counts[g]; ++i) {
      const bool fills = next != group.wanted.end() && *next == i;
      next += fills;
      if (found[i] != kNone) pins.push_back({g, found[i], fills});
    }
  }
  if (keep) {
    for (const Pin& pin : pins) groups_[pin.group].pages->hold(pin.page);
    kept = pins;
    leases_.find(stored.lease)->second = std::move(kept);
  }
  job->second.pins = std::move(pins);
  if (written > 0) return stored;
  release_all(job->second.pins);
  jobs_.erase(job);
  return Stored{0, stored.lease};
}

void Manager::end(int64_t id, bool well, bool wait) {
  const auto lock = enter(0, wait);
  const auto found = jobs_.find(id);
  if (found == jobs_.end()) {
    fail<ValueError>("job ", id, " has ended before, or is another manager's");
  }
  const Job& job = found->second;
  if (!wait && job.pins.size() > kFewKeys) throw Busy{};
  for (const Pin& pin : job.pins) {
    Group& group = groups_[pin.group];
    if (well && pin.fills) {
      group.counters.stored += group.pages->fill(pin.page);
    } else if (well) {
      group.counters.loaded += !job.is_store;
    } else if (pin.fills || !job.is_store) {
      group.pages->forget(pin.page);
      ++group.counters.failed;
    }
  }
  release_all(job.pins);
  jobs_.erase(found);
}

void Manager::touch(const Keys& keys, bool wait) {
  const auto lock = enter(total(keys), wait);
  find(keys, true);
  // Its first block is the newest then: without it no other is of use.
  size_t end = found_.size();
  for (size_t g = groups_.size(); g-- > 0;) {
    for (int64_t i = keys.counts[g]; i-- > 0;) {
      const uint32_t page = found_[--end];
      if (groups_[g].pages->is_ready(page)) groups_[g].pages->use(page);
    }
  }
}

void Manager::order(const Keys& keys, bool renew, bool wait) {
  const auto lock = enter(total(keys), wait);
  find(keys, true);
  size_t at = 0;
  for (size_t g = 0; g < groups_.size(); at += static_cast<size_t>(keys.counts[g++])) {
    Pages& pages = *groups_[g].pages;
    const auto count = static_cast<size_t>(keys.counts[g]);
    for (size_t i = renew ? count : 0; i-- > 0;) {
      if (!pages.is_idle(found_[at + i])) continue;
      pages.hold(found_[at + i]);
      pages.release(found_[at + i]);
    }
    if (!renew) pages.order(found_.data() + at, count);
  }
}

int64_t Manager::lease(const Keys& keys, double now, double seconds, bool wait) {
  const auto lock = enter(total(keys), wait);
  expire(now, wait);
  find(keys, true);
  if (std::find(found_.begin(), found_.end(), kNone) != found_.end()) return 0;
  const int64_t id = next_id();
  std::vector<Pin> pins;
  pins.reserve(found_.size());
  size_t at = 0;
  for (uint32_t g = 0; g < groups_.size(); ++g) {
    for (int64_t i = 0; i < keys.counts[g]; ++i) pins.push_back({g, found_[at++], false});
  }
  if (std::isfinite(seconds)) ends_.push({now + seconds, id});
  const std::vector<Pin>& kept = leases_.emplace(id, std::move(pins)).first->second;
  for (const Pin& pin : kept) groups_[pin.group].pages->hold(pin.page);
  return id;
}

bool Manager::release(int64_t id, bool wait) {
  const auto lock = enter(0, wait);
  const auto found = leases_.find(id);
  if (found == leases_.end()) return false;
  if (!wait && found->second.size() > kFewKeys) throw Busy{};
  release_all(found->second);
  leases_.erase(found);
  return true;
}

void Manager::reset() {
  // New pages are made, and the old ones freed, while other calls go on.
  std::vector<std::unique_ptr<Pages>> pages;
  for (size_t g = 0; g < groups_.size(); ++g) pages.push_back(make_pages(g));
  decltype(leases_) leases;
  decltype(ends_) ends;
  const std::lock_guard lock(mutex_);
  for (size_t g = 0; g < groups_.size(); ++g) {
    pages[g]->follow(*groups_[g].pages);
    groups_[g].pages.swap(pages[g]);
  }
  for (const auto& [id, job] : jobs_) {
    for (const Pin& pin : job.pins) groups_[pin.group].pages->keep_held(pin.page);
  }
  leases_.swap(leases);
  ends_.swap(ends);
  events_.record(EventKind::kCleared, -1, {});
}

void Manager::release_all(const std::vector<Pin>& pins) {
  // The last one released is the newest: the first block, without which no other is of use.
  for (size_t i = pins.size(); i-- > 0;) groups_[pins[i].group].pages->release(pins[i].page);
}

void Manager::expire(double now, bool wait) {
  for (size_t visits = 0; !ends_.empty() && ends_.top().first <= now; ends_.pop()) {
    const auto found = leases_.find(ends_.top().second);
    visits += 1 + (found == leases_.end() ? 0 : found->second.size());
    if (!wait && visits > kFewKeys) throw Busy{};
    if (found == leases_.end()) continue;
    release_all(found->second);
    leases_.erase(found);
  }
}

}  // namespace kvswap::blocks
