#include "offload/path.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "copy/staged.h"
#include "offload/job.h"

namespace kvswap {
namespace {

constexpr double kSecondsPerBatchFragment = 1e-6, kSecondsPerStridedCopy = 1.6e-6;
constexpr double kSecondsPerPage = 0.5e-6, kSecondsPerPiece = 9e-6, kSecondsPerLaunch = 4e-6;
constexpr size_t kFragmentsPerEntry = 25;
// A kernel that waits for the link slows down the compute beside it all the while.
constexpr double kMostKernelBytes = 4 << 20;
constexpr size_t kMostPieces = 8;  // of a transfer that is small enough to count

// Of a fragment of so many bytes: between the figures for the powers of two around it.
double fragment_seconds(const double* table, double bytes) {
  const double place = std::log2(bytes / 512);
  const double last = KVSWAP_FRAGMENT_SIZES - 1;
  if (place <= 0) return table[0];
  if (place >= last) return table[KVSWAP_FRAGMENT_SIZES - 1] * std::exp2(place - last);
  const auto below = static_cast<size_t>(place);
  const double share = place - static_cast<double>(below);
  return table[below] * (1 - share) + table[below + 1] * share;
}

}  // namespace

size_t queue_entries(Path path, const Group& group, size_t blocks) {
  if (path == Path::kStrided) return blocks * group.runs.size();
  if (path == Path::kStaged) return blocks + kMostPieces;
  if (path == Path::kKernel) return 1 + blocks / kPackBlocks;
  return 1 + blocks * group.gpu.count() / kFragmentsPerEntry;
}

double submit_seconds(Path path, const Group& group, size_t blocks) {
  const auto count = static_cast<double>(blocks);
  if (path == Path::kStrided) {
    return count * static_cast<double>(group.runs.size()) * kSecondsPerStridedCopy;
  }
  if (path == Path::kStaged) {
    // Pieces grow, three times as much at a time.
    const double bytes = count * static_cast<double>(group.block_bytes);
    const double pieces = std::min(count, 1 + std::log2(1 + bytes / double{kSmallestPiece}) / 2);
    return count * kSecondsPerPage + pieces * kSecondsPerPiece;
  }
  if (path == Path::kKernel) {
    return static_cast<double>(1 + blocks / kPackBlocks) * kSecondsPerLaunch;
  }
  return count * static_cast<double>(group.gpu.count()) * kSecondsPerBatchFragment;
}

PathChooser::PathChooser(const kvswap_path_options& options,
                         const std::vector<kvswap::Group>& groups)
    : forced_(options.path) {
  for (const kvswap::Group& group : groups) {
    Group& fitted = groups_.emplace_back();
    fitted.host_is_pageable = group.host_is_pageable;
    fitted.block_bytes = static_cast<double>(group.block_bytes);
    const auto planes = static_cast<double>(group.gpu.count());
    for (int direction = 0; direction < 2; ++direction) {
      for (int path = 0; path < KVSWAP_PATHS; ++path) {
        kvswap_path_costs costs = options.costs[direction][path];
        const bool calls_for_each_run = path == static_cast<int>(Path::kStrided);
        if (calls_for_each_run) costs.block_seconds *= static_cast<double>(group.runs.size());
        costs.block_seconds +=
            planes * fragment_seconds(costs.fragment_seconds, fitted.block_bytes / planes);
        fitted.costs[direction][path] = costs;
      }
    }
  }
}

double PathChooser::seconds(Path path, const Transfer& transfer) const {
  const int direction = transfer.channel == kStores ? 0 : 1;
  const kvswap_path_costs& costs = groups_[transfer.group].costs[direction][static_cast<int>(path)];
  if (costs.start_seconds < 0) return std::numeric_limits<double>::infinity();
  return costs.start_seconds + static_cast<double>(transfer.blocks) * costs.block_seconds;
}

Path PathChooser::choose(const Transfer& transfer) const {
  const Group& group = groups_[transfer.group];
  if (group.host_is_pageable) return Path::kBatch;
  const double bytes = static_cast<double>(transfer.blocks) * group.block_bytes;
  // Expedited loads have no staging buffer.
  const bool may_stage =
      transfer.may_launch && transfer.may_stage && transfer.channel != kExpedited;
  Path best = Path::kStrided;
  double least = std::numeric_limits<double>::infinity();
  for (const Path path : {Path::kStrided, Path::kBatch, Path::kStaged, Path::kKernel}) {
    if (path == Path::kStaged && !may_stage) continue;
    if (path == Path::kKernel && !transfer.may_launch) continue;
    if (forces(path)) return path;
    if (path == Path::kKernel && bytes > kMostKernelBytes) continue;
    const double predicted = seconds(path, transfer);
    if (predicted >= least) continue;
    least = predicted;
    best = path;
  }
  return best;
}

bool PathChooser::wants(Path path) const {
  if (forces(path)) return true;
  for (int group = 0; group < static_cast<int>(groups_.size()); ++group) {
    for (const int channel : {kStores, kLoads, kExpedited}) {
      for (size_t blocks = 1; blocks <= 4096; blocks *= 2) {
        if (choose({group, channel, blocks}) == path) return true;
      }
    }
  }
  return false;
}

}  // namespace kvswap
