#include "path.h"

namespace kvswap {
namespace {

constexpr size_t kFewestPlanes = 4;  // of a run, on average
constexpr double kSecondsPerBatchFragment = 1e-6, kSecondsPerStridedCopy = 1.6e-6;
constexpr size_t kFragmentsPerEntry = 25;

}  // namespace

CopyPlan plan_copy(const Group& group, PlaneRange planes, int device) {
  if (device < 0) return {Path::kHost, {}};
  if (group.host_is_pageable) return {Path::kBatch, {}};
  auto runs = equidistant_runs(group.gpu, group.host, planes);
  if (runs.size() * kFewestPlanes > planes.end - planes.begin) return {Path::kBatch, {}};
  return {Path::kStrided, std::move(runs)};
}

size_t CopyPlan::queue_entries(size_t blocks, size_t planes) const {
  if (path == Path::kStrided) return blocks * runs.size();
  return 1 + blocks * planes / kFragmentsPerEntry;
}

double CopyPlan::submit_seconds(size_t blocks, size_t planes) const {
  if (path == Path::kStrided)
    return static_cast<double>(blocks * runs.size()) * kSecondsPerStridedCopy;
  return static_cast<double>(blocks * planes) * kSecondsPerBatchFragment;
}

}  // namespace kvswap
