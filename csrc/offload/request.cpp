#include "offload/request.h"

#include <algorithm>

#include "check.h"
#include "offload/slot_states.h"

namespace kvswap {
namespace {

[[noreturn]] void refuse_id(const std::string& name, int64_t id, int64_t limit, const char* noun) {
  const std::string there = count_of(limit, noun);
  if (limit == 1) fail<IndexError>(name, " is ", id, "; there is ", there, ", 0");
  fail<IndexError>(name, " is ", id, "; there are ", there, ", 0 to ", limit - 1);
}

void check_blocks(const ArgumentNames& names, const int64_t* ids, int64_t count,
                  int64_t num_blocks) {
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= num_blocks) {
      refuse_id(item_of(names.list("gpu_block_ids"), i), ids[i], num_blocks, "GPU block");
    }
  }
}

[[noreturn]] void refuse_page(const std::string& name, int64_t page, int64_t num_pages,
                              int64_t end) {
  if (page < 0 || page >= num_pages) refuse_id(name, page, num_pages, "host page");
  const std::string ready = end == 0   ? "no page is"
                            : end == 1 ? "page 0 is"
                                       : "pages 0 to " + std::to_string(end - 1) + " are";
  fail<IndexError>(name, " is ", page, ", which is not pinned yet: ", ready,
                   "; HostPool.wait_ready(pages=", page + 1, ") waits for it");
}

// The driver cannot copy pages that are not pinned yet.
void check_pages(const ArgumentNames& names, const int64_t* ids, int64_t count,
                 const Group& group) {
  const int64_t end = group.ready_range->end_page();
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= end) {
      refuse_page(item_of(names.list("page_ids"), i), ids[i], group.num_pages, end);
    }
  }
}

}  // namespace

void check_page(const std::string& name, int64_t page, int64_t num_pages, const ReadyRange& range) {
  const int64_t end = range.end_page();
  if (page < 0 || page >= end) refuse_page(name, page, num_pages, end);
}

RequestReader::RequestReader(const std::vector<Group>& groups) {
  for (const Group& group : groups) {
    block_seen_.resize(std::max<size_t>(block_seen_.size(), group.block_space + 1));
    page_seen_.resize(std::max<size_t>(page_seen_.size(), group.slot_space + 1));
    auto& blocks = block_seen_[group.block_space];
    auto& pages = page_seen_[group.slot_space];
    blocks.resize(std::max<size_t>(blocks.size(), group.num_blocks), 0);
    pages.resize(std::max<size_t>(pages.size(), group.num_pages), 0);
  }
}

JobRef RequestReader::read(const Request& request, const std::vector<Group>& groups) {
  JobRef job(new Job);
  job->work = std::make_unique<Work>();
  Work& work = *job->work;
  job->tag = request.tag;
  job->channel = static_cast<uint8_t>(request.channel);
  job->layer_groups = request.layer_groups;
  work.is_grouped = request.is_grouped;
  ++requests_;
  size_t total = 0;
  for (const Request::Part& part : request.parts) total += part.blocks.size();
  work.ids.reserve(2 * total);
  for (size_t g = 0; g < groups.size(); ++g) {
    const Request::Part& part = request.parts[g];
    if (part.blocks.empty() && part.pages.empty()) continue;
    add_part(*job, groups[g], {request.is_grouped, static_cast<int>(g)}, part);
  }
  // The slots follow all blocks.
  for (const JobPart& part : work.parts) {
    const auto& [blocks, pages, first] = request.parts[part.group];
    const int64_t per_page = groups[part.group].blocks_per_page;
    for (int64_t i = first; i < first + static_cast<int64_t>(part.count); ++i) {
      work.ids.push_back(pages[i / per_page] * per_page + i % per_page);
    }
  }
  return job;
}

void RequestReader::add_part(Job& job, const Group& group, const ArgumentNames& names,
                             const Request::Part& part) {
  const int64_t *blocks = part.blocks.data(), *pages = part.pages.data();
  const auto num_blocks = static_cast<int64_t>(part.blocks.size());
  const auto num_pages = static_cast<int64_t>(part.pages.size());
  const int64_t first_slot = part.first_slot;
  const int64_t per_page = group.blocks_per_page;
  check_blocks(names, blocks, num_blocks, group.num_blocks);
  check_pages(names, pages, num_pages, group);
  if (first_slot < 0 || first_slot >= per_page) {
    fail<ValueError>(names.list("first_slot"), "=", first_slot,
                     " is not a slot of the first page: with blocks_per_page=", per_page,
                     " a page has ",
                     per_page == 1 ? "slot 0 only" : "slots 0 to " + std::to_string(per_page - 1));
  }
  const int64_t needed = num_blocks ? (first_slot + num_blocks + per_page - 1) / per_page : 0;
  if (num_pages != needed) {
    fail<ValueError>(names.list("page_ids"), " has ", count_of(num_pages, "page"), " of ",
                     count_of(per_page, "block"), "; for ", count_of(num_blocks, "block"),
                     " from first_slot=", first_slot, " on, pass ", count_of(needed, "page"));
  }
  if (job.channel == kStores) {
    refuse_duplicates(page_seen_[group.slot_space], names, "page_ids", pages, num_pages);
  } else {
    refuse_duplicates(block_seen_[group.block_space], names, "gpu_block_ids", blocks, num_blocks);
  }
  check_encoding(*job.work, group, num_blocks);
  job.work->parts.push_back({names.group, static_cast<size_t>(num_blocks)});
  job.work->ids.insert(job.work->ids.end(), blocks, blocks + num_blocks);
  job.nbytes += group.block_bytes * num_blocks;
}

void RequestReader::check_encoding(Work& work, const Group& group, int64_t num_blocks) {
  const Demand* const demand = group.encoding->demand();
  if (demand == nullptr) return;
  const uint64_t blocks = work.rejectable_blocks + static_cast<uint64_t>(num_blocks);
  if (blocks > SlotStates::kCount) {
    fail<ValueError>("the job has ", blocks, " blocks for host pages with ", demand->option,
                     "; a job can have ", SlotStates::kCount, "; submit several jobs");
  }
  work.rejectable_blocks = static_cast<uint32_t>(blocks);
  if (group.encoding->slot_bytes() < group.block_bytes) work.encoded_blocks += num_blocks;
}

void RequestReader::refuse_duplicates(std::vector<int64_t>& seen, const ArgumentNames& names,
                                      const char* name, const int64_t* ids, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (seen[ids[i]] != requests_) {
      seen[ids[i]] = requests_;
      continue;
    }
    const std::string list = names.list(name);
    const int64_t first = std::find(ids, ids + i, ids[i]) - ids;
    if (first == i) {
      fail<ValueError>(list, "[", i, "] is ", ids[i],
                       ", which another group of this job writes too; their memory is the same");
    }
    fail<ValueError>(list, "[", first, "] and ", list, "[", i, "] are both ", ids[i],
                     ": it would be written twice; pass each destination once");
  }
}

}  // namespace kvswap
