#include "offload/request.h"

#include <algorithm>

#include "check.h"
#include "offload/slot_states.h"

namespace kvswap {
namespace {

std::string count_of(int64_t count, const char* noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

void check_ids(const std::string& list, const int64_t* ids, int64_t count, int64_t limit,
               const char* noun) {
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= limit) {
      fail<IndexError>(list, "[", i, "] is ", ids[i], "; there are ", limit, " ", noun, ", 0 to ",
                       limit - 1);
    }
  }
}

// The driver cannot copy pages that are not pinned yet, or are pinned by another process only.
void check_ready(const std::string& list, const int64_t* ids, int64_t count, const Group& group) {
  const int64_t first = group.ready_range->first_page;
  const int64_t end = __atomic_load_n(&group.ready_range->end_page, __ATOMIC_ACQUIRE);
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] >= first && ids[i] < end) continue;
    fail<IndexError>(list, "[", i, "] is ", ids[i], "; of the ", group.num_pages,
                     " host pages those from ", first, " to ", end - 1,
                     " can be used: the others are not pinned yet, or another rank has them");
  }
}

}  // namespace

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

std::string RequestReader::Names::list(const char* name) const {
  return grouped ? std::string(name) + "[" + std::to_string(group) + "]" : name;
}

JobRef RequestReader::read(const kvswap_request& request, const std::vector<Group>& groups) {
  JobRef job(new Job);
  job->work = std::make_unique<Work>();
  Work& work = *job->work;
  job->channel = static_cast<int>(request.channel);
  job->layer_groups = static_cast<int>(request.layer_groups);
  work.copy_engines_only = request.copy_engines_only != 0;
  work.is_grouped = request.grouped != 0;
  ++requests_;
  const int64_t *blocks = request.blocks, *pages = request.pages, *counts = request.counts();
  int64_t total = 0;
  for (size_t g = 0; g < groups.size(); ++g) total += counts[3 * g];
  work.ids.reserve(2 * total);
  for (size_t g = 0; g < groups.size(); ++g, counts += 3) {
    const Names names{request.grouped != 0, static_cast<int>(g)};
    if (counts[0] != 0 || counts[1] != 0) {
      add_part(*job, groups[g], names, blocks, pages, counts);
    }
    blocks += counts[0];
    pages += counts[1];
  }
  // The slots follow all blocks.
  pages = request.pages;
  for (const JobPart& part : work.parts) {
    const Group& group = groups[part.group];
    const int64_t first = request.counts()[3 * part.group + 2], per_page = group.blocks_per_page;
    for (int64_t i = first; i < first + static_cast<int64_t>(part.count); ++i) {
      work.ids.push_back(pages[i / per_page] * per_page + i % per_page);
    }
    pages += request.counts()[3 * part.group + 1];
  }
  return job;
}

void RequestReader::add_part(Job& job, const Group& group, const Names& names,
                             const int64_t* blocks, const int64_t* pages, const int64_t* counts) {
  const int64_t num_blocks = counts[0], num_pages = counts[1], first_block = counts[2];
  const int64_t per_page = group.blocks_per_page;
  const std::string block_list = names.list("gpu_block_ids"), page_list = names.list("page_ids");
  check_ids(block_list, blocks, num_blocks, group.num_blocks, "GPU blocks");
  check_ids(page_list, pages, num_pages, group.num_pages, "host pages");
  check_ready(page_list, pages, num_pages, group);
  if (first_block < 0 || first_block >= per_page) {
    fail<ValueError>(names.list("first_block"), "=", first_block,
                     " is outside of the first page, whose blocks are 0 to ", per_page - 1);
  }
  const int64_t needed = num_blocks ? (first_block + num_blocks + per_page - 1) / per_page : 0;
  if (num_pages != needed) {
    fail<ValueError>(page_list, " has ", count_of(num_pages, "page"), " of ",
                     count_of(per_page, "block"), "; for ", count_of(num_blocks, "block"),
                     " from first_block=", first_block, " on, pass ", count_of(needed, "page"));
  }
  if (job.channel == kStores) {
    refuse_duplicates(page_seen_[group.slot_space], page_list, pages, num_pages);
  } else {
    refuse_duplicates(block_seen_[group.block_space], block_list, blocks, num_blocks);
  }
  if (group.format != nullptr) add_encoded(*job.work, page_list, num_blocks);
  job.work->parts.push_back({names.group, static_cast<size_t>(num_blocks)});
  job.work->ids.insert(job.work->ids.end(), blocks, blocks + num_blocks);
  job.nbytes += group.block_bytes * num_blocks;
}

void RequestReader::add_encoded(Work& work, const std::string& page_list, int64_t num_blocks) {
  if (work.copy_engines_only) {
    fail<ValueError>("copy_engines_only=True: the host pages of ", page_list,
                     " have encoding='lossless', and copy engines cannot encode or decode blocks; "
                     "leave it out, or use a pool with encoding='raw'");
  }
  const uint64_t blocks = work.encoded_blocks + static_cast<uint64_t>(num_blocks);
  if (blocks > SlotStates::kCount) {
    fail<ValueError>("the job has ", blocks,
                     " blocks for host pages with encoding='lossless'; a "
                     "job can have ",
                     SlotStates::kCount, "; submit several jobs");
  }
  work.encoded_blocks = static_cast<uint32_t>(blocks);
}

void RequestReader::refuse_duplicates(std::vector<int64_t>& seen, const std::string& list,
                                      const int64_t* ids, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (seen[ids[i]] != requests_) {
      seen[ids[i]] = requests_;
      continue;
    }
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
