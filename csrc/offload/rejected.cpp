#include "offload/rejected.h"

#include <algorithm>
#include <sstream>

namespace kvswap {
namespace {

constexpr size_t kShownPositions = 8;

using Positions = std::vector<int64_t>;

void list(std::ostream& text, const Positions& positions) {
  text << (positions.size() == 1 ? "(position " : "(positions ");
  const char* separator = "";
  for (size_t i = 0; i < std::min(positions.size(), kShownPositions); ++i) {
    text << separator << positions[i];
    separator = ", ";
  }
  text << (positions.size() > kShownPositions ? ", ...)" : ")");
}

// The first of some blocks that were rejected, and its group.
struct First {
  SlotState state = SlotState::kGood;
  const Group* group = nullptr;
  int64_t block = 0, slot = 0;
};

// What is known of a corrupted block: which one it is, and its checksums.
void describe(std::ostream& text, const First& first) {
  const int64_t per_page = first.group->blocks_per_page;
  text << ": GPU block " << first.block << ", page " << first.slot / per_page;
  if (per_page > 1) text << ", slot " << first.slot % per_page;
  text << first.group->encoding->difference_in(first.slot);
}

// Why the job has failed: its blocks at these positions were rejected.
Reason reason_for(const Job& job, const Positions& positions, const First& first) noexcept {
  const Rejection& why = first.group->encoding->rejection(first.state, job.channel == kStores);
  const bool is_corrupted = first.state == SlotState::kCorrupted;
  const auto text = [&] {
    std::ostringstream text;
    const size_t count = job.work->count();
    const bool is_one = positions.size() == 1;
    text << positions.size() << " of " << count << (count == 1 ? " block " : " blocks ")
         << (is_one ? why.one : why.several) << " ";
    list(text, positions);
    text << (is_one ? why.one_cause : why.several_cause);
    if (is_corrupted) describe(text, first);
    return text.str();
  };
  return Reason(text, why.brief, is_corrupted ? Reason::Kind::kCorrupted : Reason::Kind::kRejected);
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
      const int64_t destination = destinations[state - part.states];
      found.push_back({part.group, destination, static_cast<SlotState>(*state++)});
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

Reason reject_blocks(Job& job, const std::vector<RejectedBlock>& rejected,
                     const std::vector<Group>& groups) noexcept try {
  if (rejected.empty()) return {};
  Positions positions, corrupted;
  std::vector<std::pair<uint32_t, int64_t>> pages;
  First first, first_corrupted;
  const Work& work = *job.work;
  const int64_t* const destinations = job.channel == kStores ? work.slots() : work.blocks();
  size_t i = 0;
  for (const JobPart& part : work.parts) {
    for (const size_t end = i + part.count; i < end; ++i) {
      const RejectedBlock wanted{part.group, destinations[i], SlotState::kGood};
      const auto found = std::lower_bound(rejected.begin(), rejected.end(), wanted);
      if (found == rejected.end() || wanted < *found) continue;
      const First block{found->state, &groups[part.group], work.blocks()[i], work.slots()[i]};
      if (found->state == SlotState::kCorrupted) {
        if (corrupted.empty()) first_corrupted = block;
        corrupted.push_back(static_cast<int64_t>(i));
      }
      if (positions.empty()) first = block;
      positions.push_back(static_cast<int64_t>(i));
      pages.emplace_back(part.group, work.slots()[i] / groups[part.group].blocks_per_page);
    }
  }
  if (positions.empty()) return {};
  const Reason reason = corrupted.empty() ? reason_for(job, positions, first)
                                          : reason_for(job, corrupted, first_corrupted);
  if (job.pages != nullptr) {
    std::sort(pages.begin(), pages.end());
    job.pages->rejected = std::move(pages);
  }
  job.rejected = std::make_unique<const Positions>(std::move(positions));
  job.corrupted = static_cast<uint32_t>(corrupted.size());
  return reason;
} catch (const std::exception& error) {
  return Reason(error);
}

}  // namespace kvswap
