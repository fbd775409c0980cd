#include "offload/split.h"

#include <algorithm>
#include <numeric>

namespace kvswap {
namespace {

// The blocks from `first` on, as a part of their own.
TransferPart cut(TransferPart& part, size_t first, const Group& group) {
  TransferPart rest{part.group, part.path, {}, {}};
  for (auto [from, to] : {std::pair(&part.blocks, &rest.blocks), {&part.slots, &rest.slots}}) {
    to->assign(from->begin() + first, from->end());
    from->resize(first);
  }
  rest.after = part.after;
  rest.before = part.before + first * group.block_bytes;
  part.after += rest.blocks.size() * group.block_bytes;
  return rest;
}

}  // namespace

void split_edge(std::vector<TransferPart>& parts, const Group& group, int channel, size_t blocks) {
  TransferPart& all = parts.front();
  const size_t count = all.blocks.size();
  if (parts.size() != 1 || all.path != Path::kStaged || blocks == 0 || count < 2 * blocks) return;
  const bool is_store = channel == kStores;
  parts.push_back(cut(all, is_store ? blocks : count - blocks, group));
  TransferPart& edge = is_store ? parts.front() : parts.back();
  edge.path = Path::kStrided;
  edge.is_edge = true;
}

size_t split_later(std::vector<TransferPart>& parts, const Group& group, double seconds) {
  const auto is_most = [](const TransferPart& part) { return !part.is_edge; };
  const auto most = std::find_if(parts.begin(), parts.end(), is_most);
  size_t blocks = 1;
  while (blocks < most->blocks.size() && submit_seconds(most->path, group, blocks + 1) <= seconds) {
    ++blocks;
  }
  if (blocks == most->blocks.size()) return parts.size();
  TransferPart rest = cut(*most, blocks, group);
  const size_t later = most - parts.begin() + 1;
  parts.insert(parts.begin() + later, std::move(rest));
  return later;
}

void sort_by_slot(TransferPart& part) {
  if (std::is_sorted(part.slots.begin(), part.slots.end())) return;
  std::vector<size_t> order(part.slots.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](size_t one, size_t other) { return part.slots[one] < part.slots[other]; });
  const TransferPart old = part;
  for (size_t i = 0; i < order.size(); ++i) {
    part.blocks[i] = old.blocks[order[i]];
    part.slots[i] = old.slots[order[i]];
  }
}

}  // namespace kvswap
