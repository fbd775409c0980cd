#include "offload/hazards.h"

#include <algorithm>

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

Hazards::Blocks Hazards::make_blocks(const std::vector<Group>& groups) const {
  Blocks blocks;
  for (int channel = 0; channel < kChannels; ++channel) {
    blocks.latest[channel] = latest_[channel].of_blocks;
  }
  std::vector<int64_t> counts;  // by space
  for (const Group& group : groups) {
    blocks.spaces.push_back(group.block_space);
    counts.resize(std::max<size_t>(counts.size(), group.block_space + 1));
    counts[group.block_space] = std::max(counts[group.block_space], group.num_blocks);
  }
  for (auto& latest : blocks.latest) {
    latest.resize(counts.size());
    for (size_t space = 0; space < counts.size(); ++space) latest[space].resize(counts[space], -1);
  }
  return blocks;
}

void Hazards::rebind(Blocks blocks) noexcept {
  block_space_.swap(blocks.spaces);
  for (int channel = 0; channel < kChannels; ++channel) {
    latest_[channel].of_blocks.swap(blocks.latest[channel]);
  }
}

template <typename Visit>
void Hazards::for_each(const Work& work, const Visit& visit) const {
  size_t i = 0;
  for (const Part& part : work.parts) {
    const int blocks = block_space_[part.group], slots = slot_space_[part.group];
    for (const size_t end = i + part.count; i < end; ++i) visit(blocks, slots, i);
  }
}

void Hazards::order(Job& job) const noexcept {
  Work& work = *job.work;
  for (int channel = 0; channel < kChannels; ++channel) {
    const Latest& latest = latest_[channel];
    const bool both_store = job.channel == kStores && channel == kStores;
    const bool both_load = job.channel != kStores && channel != kStores;
    int64_t behind = -1;
    for_each(work, [&](int blocks, int slots, size_t i) {
      // Two stores may read one block, two loads one slot.
      if (!both_store) behind = std::max(behind, latest.of_blocks[blocks][work.blocks()[i]]);
      if (!both_load) behind = std::max(behind, latest.of_slots[slots][work.slots()[i]]);
    });
    work.behind[channel] = behind;
  }
}

void Hazards::note(const Job& job) noexcept {
  const Work& work = *job.work;
  Latest& latest = latest_[job.channel];
  for_each(work, [&](int blocks, int slots, size_t i) {
    latest.of_blocks[blocks][work.blocks()[i]] = job.id;
    latest.of_slots[slots][work.slots()[i]] = job.id;
  });
}

int64_t Hazards::latest_store(const Work& work, size_t i) const noexcept {
  return latest_[kStores].of_slots[slot_space_[group_of(work, i)]][work.slots()[i]];
}

int64_t Hazards::latest_load(const Work& work, size_t i) const noexcept {
  const int space = block_space_[group_of(work, i)];
  return std::max(latest_[kLoads].of_blocks[space][work.blocks()[i]],
                  latest_[kExpedited].of_blocks[space][work.blocks()[i]]);
}

int64_t Hazards::slot_key(const Work& work, size_t i) const noexcept {
  return first_key_[slot_space_[group_of(work, i)]] + work.slots()[i];
}

// i: less than work.count().
int Hazards::group_of(const Work& work, size_t i) {
  auto part = work.parts.begin();
  for (; i >= part->count; ++part) i -= part->count;
  return part->group;
}

}  // namespace kvswap
