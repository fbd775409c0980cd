#include "offload/rejected.h"

#include <algorithm>
#include <sstream>

namespace kvswap {
namespace {

constexpr size_t kShownPositions = 8;

// The group of the block at a position in the job's list of blocks.
const Group& group_at(const Job& job, int64_t position, const std::vector<Group>& groups) {
  auto part = job.work->parts.begin();
  for (auto i = static_cast<size_t>(position); i >= part->count; ++part) i -= part->count;
  return groups[part->group];
}

void list(std::ostream& text, const std::vector<int64_t>& positions) {
  text << (positions.size() == 1 ? "(position " : "(positions ");
  const char* separator = "";
  for (size_t i = 0; i < std::min(positions.size(), kShownPositions); ++i) {
    text << separator << positions[i];
    separator = ", ";
  }
  text << (positions.size() > kShownPositions ? ", ...)" : ")");
}

}  // namespace

std::vector<RejectedBlock> find_rejected(const Transfer& transfer) {
  std::vector<RejectedBlock> found;
  const bool is_store = transfer.jobs.front().channel == kStores;
  const auto is_refused = [](uint8_t state) { return state != 0; };
  for (const TransferPart& part : transfer.parts) {
    if (part.states == nullptr) continue;
    const std::vector<int64_t>& destinations = is_store ? part.slots : part.blocks;
    const uint8_t* const end = part.states + destinations.size();
    const uint8_t* state = part.states;
    while ((state = std::find_if(state, end, is_refused)) != end) {
      found.push_back({part.group, destinations[state++ - part.states]});
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

std::unique_ptr<const std::vector<int64_t>> positions_in(
    const Job& job, const std::vector<RejectedBlock>& rejected) {
  if (rejected.empty()) return nullptr;
  std::vector<int64_t> positions;
  const Work& work = *job.work;
  const int64_t* const destinations = job.channel == kStores ? work.slots() : work.blocks();
  size_t i = 0;
  for (const JobPart& part : work.parts) {
    for (const size_t end = i + part.count; i < end; ++i) {
      const RejectedBlock block{part.group, destinations[i]};
      if (std::binary_search(rejected.begin(), rejected.end(), block)) {
        positions.push_back(static_cast<int64_t>(i));
      }
    }
  }
  if (positions.empty()) return nullptr;
  return std::make_unique<const std::vector<int64_t>>(std::move(positions));
}

Reason rejection(const Job& job, const std::vector<int64_t>& positions,
                 const std::vector<Group>& groups) noexcept {
  const bool is_store = job.channel == kStores, is_one = positions.size() == 1;
  const auto text = [&] {
    std::ostringstream text;
    const size_t count = job.work->count();
    text << positions.size() << " of " << count << (count == 1 ? " block " : " blocks ");
    if (is_store) {
      const Group& group = group_at(job, positions.front(), groups);
      text << (is_one ? "does not fit into a slot of " : "do not fit into slots of ")
           << group.encoding_width_eighths / 8.0 << " bits a value ";
      list(text, positions);
    } else {
      text << (is_one ? "is not in its host page " : "are not in their host pages ");
      list(text, positions);
      text << (is_one ? ": its store was rejected, or nothing was stored there"
                      : ": their stores were rejected, or nothing was stored there");
    }
    return text.str();
  };
  return Reason(text,
                is_store ? "some blocks do not fit into their slots"
                         : "some blocks are not in their host pages",
                Reason::Kind::kRejected);
}

}  // namespace kvswap
