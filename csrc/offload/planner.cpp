#include "planner.h"

#include <algorithm>

#include "../check.h"
#include "../cuda_context.h"
#include "../kernels.h"

namespace kvswap {

Planner::Planner(std::vector<Group>& groups, int device, const kvswap_path_options& options,
                 std::vector<std::unique_ptr<Channel>>& channels)
    : groups_(groups),
      device_(device),
      staging_bytes_(options.staging_bytes),
      chooser_(options),
      stream_(channels[kStores]->stream()) {
  if (device < 0) return;
  try {
    set_up(channels);
  } catch (const std::exception& error) {
    close();
    for (const Path path : {Path::kStaged, Path::kKernel}) {
      if (!chooser_.forces(path)) continue;
      fail<ValueError>("path='", path_name(path), "' cannot be had: ", error.what());
    }
  }
}

void Planner::set_up(std::vector<std::unique_ptr<Channel>>& channels) {
  const auto wanted = [&](Path path) {
    const auto wants = [&](const Group& group) { return chooser_.wants(path, group); };
    return chooser_.forces(path) || std::any_of(groups_.begin(), groups_.end(), wants);
  };
  const bool stages = wanted(Path::kStaged);
  if (!stages && !wanted(Path::kKernel)) return;
  cuda::kernels(device_);
  make_tables();
  has_kernels_ = true;
  for (const Group& group : groups_) {
    const bool forced = chooser_.forces(Path::kStaged) || chooser_.forces(Path::kKernel);
    KVSWAP_CHECK(!forced || group.table != nullptr, "the host pages are not pinned");
  }
  if (!stages) return;
  KVSWAP_CHECK(staging_bytes_ >= kFewestStagingBytes, "staging_bytes=", staging_bytes_,
               " is too little; give it ", kFewestStagingBytes, " or more");
  KVSWAP_DRIVER_CHECK(cuda::driver().allocate(&staging_, staging_bytes_), "cuMemAlloc of ",
                      staging_bytes_, " bytes for staging");
  const uint64_t half = staging_bytes_ / 2;
  channels[kStores]->use_staging(staging_, half);
  channels[kLoads]->use_staging(staging_ + half, half);
}

void Planner::make_tables() {
  for (Group& group : groups_) {
    const int64_t slots = group.num_pages * group.blocks_per_page;
    if (group.host_is_pageable || !is_packed(group.host, group.num_blocks, slots)) continue;
    group.table = std::make_shared<PlaneTable>(group.gpu, group.host, stream_);
  }
}

void Planner::rebind() {
  if (has_kernels_) make_tables();
}

Path Planner::choose(const Job& job, int group, size_t blocks) const {
  if (device_ < 0) return Path::kHost;
  const bool may_launch = groups_[group].table != nullptr;
  return chooser_.choose(groups_[group], {job.channel, blocks, job.background,
                                          may_launch && staging_ != 0, may_launch});
}

Path Planner::path_of(const Job& job) const {
  if (job.parts.empty()) return choose(job, 0, 0);
  return choose(job, job.parts.front().group, job.parts.front().count);
}

size_t Planner::entries_of(const Job& job) const {
  size_t entries = 0;
  for (const Part& part : job.parts) {
    const Path path = choose(job, part.group, part.count);
    entries += queue_entries(path, groups_[part.group], part.count);
  }
  return entries;
}

double Planner::submit_seconds_of(const Job& job) const {
  double seconds = 0;
  for (const Part& part : job.parts) {
    const Path path = choose(job, part.group, part.count);
    seconds += submit_seconds(path, groups_[part.group], part.count);
  }
  return seconds;
}

std::vector<TransferPart> Planner::parts_of(const std::vector<JobRef>& jobs) const {
  std::vector<TransferPart> parts;
  std::vector<size_t> place(groups_.size(), groups_.size());  // of each group in `parts`
  for (const JobRef& job : jobs) {
    const int64_t *blocks = job->blocks(), *slots = job->slots();
    for (const Part& part : job->parts) {
      if (place[part.group] == groups_.size()) {
        place[part.group] = parts.size();
        parts.push_back({part.group, Path::kHost, {}, {}});
      }
      TransferPart& all = parts[place[part.group]];
      all.blocks.insert(all.blocks.end(), blocks, blocks + part.count);
      all.slots.insert(all.slots.end(), slots, slots + part.count);
      blocks += part.count;
      slots += part.count;
    }
  }
  for (TransferPart& part : parts)
    part.path = choose(*jobs.front(), part.group, part.blocks.size());
  return parts;
}

size_t Planner::entries_of(const std::vector<TransferPart>& parts) const {
  size_t entries = 0;
  for (const TransferPart& part : parts) {
    entries += queue_entries(part.path, groups_[part.group], part.blocks.size());
  }
  return entries;
}

void Planner::close() {
  for (Group& group : groups_) group.table.reset();
  if (staging_ != 0) cuda::driver().free(staging_);
  staging_ = 0;
}

}  // namespace kvswap
