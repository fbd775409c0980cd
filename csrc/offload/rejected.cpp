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
  const Encoding& encoding = *group_at(job, positions.front(), groups).encoding;
  const Rejection& why = *encoding.rejection(job.channel == kStores);
  const auto text = [&] {
    std::ostringstream text;
    const size_t count = job.work->count();
    const bool is_one = positions.size() == 1;
    text << positions.size() << " of " << count << (count == 1 ? " block " : " blocks ")
         << (is_one ? why.one : why.several) << " ";
    list(text, positions);
    text << (is_one ? why.one_cause : why.several_cause);
    return text.str();
  };
  return Reason(text, why.brief, Reason::Kind::kRejected);
}

}  // namespace kvswap
