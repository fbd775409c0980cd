#include "hazards.h"

#include <algorithm>

#include "../check.h"

namespace kvswap {

Hazards::Hazards(const std::vector<Group>& groups) {
  std::vector<int64_t> blocks, slots;  // how many, by space
  for (const Group& group : groups) {
    block_space_.push_back(group.block_space);
    slot_space_.push_back(group.slot_space);
    blocks.resize(std::max<size_t>(blocks.size(), group.block_space + 1));
    slots.resize(std::max<size_t>(slots.size(), group.slot_space + 1));
    int64_t& of_blocks = blocks[group.block_space];
    int64_t& of_slots = slots[group.slot_space];
    of_blocks = std::max(of_blocks, group.num_blocks);
    of_slots = std::max(of_slots, group.num_pages * group.blocks_per_page);
  }
  first_key_.push_back(0);
  for (const int64_t count : slots) first_key_.push_back(first_key_.back() + count);
  for (Latest& latest : latest_) {
    for (const int64_t count : blocks) latest.of_blocks.emplace_back(count, -1);
    for (const int64_t count : slots) latest.of_slots.emplace_back(count, -1);
  }
}

void Hazards::rebind(const std::vector<Group>& groups) {
  const Hazards fresh(groups);
  for (int channel = 0; channel < kChannels; ++channel) {
    auto& of_blocks = latest_[channel].of_blocks;
    of_blocks.resize(fresh.latest_[channel].of_blocks.size());
    for (size_t space = 0; space < of_blocks.size(); ++space) {
      of_blocks[space].resize(fresh.latest_[channel].of_blocks[space].size(), -1);
    }
  }
  block_space_ = fresh.block_space_;
}

template <typename Visit>
void Hazards::for_each(const Job& job, const Visit& visit) const {
  size_t i = 0;
  for (const Part& part : job.parts) {
    const int blocks = block_space_[part.group], slots = slot_space_[part.group];
    for (const size_t end = i + part.count; i < end; ++i) visit(blocks, slots, i);
  }
}

void Hazards::order(Job& job) const {
  for (int channel = 0; channel < kChannels; ++channel) {
    const Latest& latest = latest_[channel];
    const bool both_store = job.channel == kStores && channel == kStores;
    const bool both_load = job.channel != kStores && channel != kStores;
    int64_t behind = -1;
    for_each(job, [&](int blocks, int slots, size_t i) {
      // Two stores may read one block, two loads one slot.
      if (!both_store) behind = std::max(behind, latest.of_blocks[blocks][job.blocks()[i]]);
      if (!both_load) behind = std::max(behind, latest.of_slots[slots][job.slots()[i]]);
    });
    job.behind[channel] = behind;
  }
}

void Hazards::note(const Job& job) {
  Latest& latest = latest_[job.channel];
  for_each(job, [&](int blocks, int slots, size_t i) {
    latest.of_blocks[blocks][job.blocks()[i]] = job.id;
    latest.of_slots[slots][job.slots()[i]] = job.id;
  });
}

int64_t Hazards::latest_store(const Job& job, size_t i) const {
  return latest_[kStores].of_slots[slot_space_[group_of(job, i)]][job.slots()[i]];
}

int64_t Hazards::latest_load(const Job& job, size_t i) const {
  const int space = block_space_[group_of(job, i)];
  return std::max(latest_[kLoads].of_blocks[space][job.blocks()[i]],
                  latest_[kExpedited].of_blocks[space][job.blocks()[i]]);
}

int64_t Hazards::slot_key(const Job& job, size_t i) const {
  return first_key_[slot_space_[group_of(job, i)]] + job.slots()[i];
}

int Hazards::group_of(const Job& job, size_t i) const {
  for (const Part& part : job.parts) {
    if (i < part.count) return part.group;
    i -= part.count;
  }
  fail("a job of ", job.count(), " blocks was asked for one more");
}

}  // namespace kvswap
