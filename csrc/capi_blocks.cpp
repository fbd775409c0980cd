#include "capi_blocks.h"

#include <tuple>

#include "c_error.h"
#include "prefix/manager.h"

namespace {

using kvswap::succeeds;
using kvswap::blocks::Keys;
using kvswap::blocks::Manager;

static_assert(sizeof(kvswap_blocks_event) == sizeof(kvswap::blocks::Event));
static_assert(KVSWAP_DIGEST_BYTES == kvswap::blocks::kDigestBytes);
static_assert(KVSWAP_BLOCKS_FEW_KEYS == Manager::kFewKeys);

Manager& manager_at(void* blocks) { return *static_cast<Manager*>(blocks); }

Keys read_keys(const void* keys, const int64_t* counts) {
  return {static_cast<const uint8_t*>(keys), counts};
}

// What a call answers that is made again without the GIL, or that fails.
template <typename Call>
int64_t answer(const Call& call) {
  int64_t value = -1;
  succeeds([&] {
    try {
      value = static_cast<int64_t>(call());
    } catch (const kvswap::blocks::Busy&) {
      value = KVSWAP_BLOCKS_BUSY;
    }
  });
  return value;
}

std::vector<kvswap::blocks::GroupOptions> read_groups(const kvswap_blocks_group* groups,
                                                      int count) {
  std::vector<kvswap::blocks::GroupOptions> read;
  for (int i = 0; i < count; ++i) {
    const auto [num_pages, ratio, window] = groups[i];
    read.push_back({size_t(num_pages), size_t(ratio), size_t(window)});
  }
  return read;
}

}  // namespace

void* kvswap_blocks_create(const kvswap_blocks_group* groups, int count,
                           const kvswap_blocks_options* options) {
  void* made = nullptr;
  succeeds([&] {
    made = new Manager(read_groups(groups, count),
                       {static_cast<kvswap::blocks::PolicyKind>(options->policy),
                        static_cast<uint32_t>(options->store_threshold),
                        static_cast<size_t>(options->asked_capacity), options->events});
  });
  return made;
}

void kvswap_blocks_destroy(void* blocks) { delete &manager_at(blocks); }

bool kvswap_blocks_grow(void* blocks, const int64_t* ready_pages) {
  return succeeds([&] { manager_at(blocks).grow(ready_pages); });
}

int64_t kvswap_blocks_lookup(void* blocks, const void* keys, const int64_t* counts, bool again,
                             kvswap_blocks_found* found, bool wait) {
  return answer([&] {
    const auto [cached, ready, pending] =
        manager_at(blocks).lookup(read_keys(keys, counts), again, wait);
    *found = {cached, ready, pending};
    return 1;
  });
}

int64_t kvswap_blocks_prepare_load(void* blocks, const void* keys, const int64_t* counts,
                                   int64_t* pages, bool wait) {
  return answer(
      [&] { return manager_at(blocks).prepare_load(read_keys(keys, counts), pages, wait); });
}

int64_t kvswap_blocks_prepare_store(void* blocks, const void* keys, const int64_t* counts,
                                    double now, bool keep, int64_t* places, int64_t* pages,
                                    int64_t* new_counts, int64_t* job, int64_t* lease, bool wait) {
  return answer([&] {
    const auto stored = manager_at(blocks).prepare_store(read_keys(keys, counts), now, keep, places,
                                                         pages, new_counts, wait);
    if (stored) std::tie(*job, *lease) = std::pair(stored->job, stored->lease);
    return stored.has_value();
  });
}

int64_t kvswap_blocks_end(void* blocks, int64_t job, bool well, bool wait) {
  return answer([&] {
    manager_at(blocks).end(job, well, wait);
    return 1;
  });
}

int64_t kvswap_blocks_touch(void* blocks, const void* keys, const int64_t* counts, bool wait) {
  return answer([&] {
    manager_at(blocks).touch(read_keys(keys, counts), wait);
    return 1;
  });
}

int64_t kvswap_blocks_order(void* blocks, const void* keys, const int64_t* counts, bool renew,
                            bool wait) {
  return answer([&] {
    manager_at(blocks).order(read_keys(keys, counts), renew, wait);
    return 1;
  });
}

int64_t kvswap_blocks_lease(void* blocks, const void* keys, const int64_t* counts, double now,
                            double seconds, bool wait) {
  return answer(
      [&] { return manager_at(blocks).lease(read_keys(keys, counts), now, seconds, wait); });
}

int64_t kvswap_blocks_release(void* blocks, int64_t lease, bool wait) {
  return answer([&] { return manager_at(blocks).release(lease, wait); });
}

bool kvswap_blocks_reset(void* blocks) {
  return succeeds([&] { manager_at(blocks).reset(); });
}

int64_t kvswap_blocks_events(void* blocks, kvswap_blocks_event* events, int64_t capacity) {
  int64_t taken = -1;
  succeeds([&] {
    auto* into = reinterpret_cast<kvswap::blocks::Event*>(events);
    taken = static_cast<int64_t>(manager_at(blocks).take_events(into, size_t(capacity)));
  });
  return taken;
}

bool kvswap_blocks_stats_of(void* blocks, int group, double now, kvswap_blocks_stats* stats) {
  return succeeds([&] {
    manager_at(blocks).stats(size_t(group), now, [&](const auto& of, const auto& pages) {
      *stats = {of.asked,           of.hits,          of.pending,
                of.stored,          of.loaded,        pages.num_evicted(),
                of.skipped,         of.refused,       of.failed,
                pages.num_ready(),  pages.num_free(), pages.num_idle(),
                pages.num_filling()};
    });
  });
}
