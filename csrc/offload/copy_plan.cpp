#include "offload/copy_plan.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <optional>

#include "check.h"
#include "copy/staged_piece.h"
#include "kernels/pack_arguments.h"
#include "offload/clock.h"

namespace kvswap {
namespace {

// The small pieces of a transfer's first layer group are fewer than kSmallPieces. Each piece of
// full size, and each piece of a further layer group, is a copy with its events.
constexpr size_t kSmallPieces = 8, kEntriesPerPiece = 3;
// An entry for the event at the end of each further layer group. kMaxRunning leaves room for the
// other events of transfers.
constexpr uint32_t more_ends(int layer_groups) { return layer_groups - 1; }
// A kernel that waits for the link slows down the compute beside it all the while, a load of 160 x
// 8 KiB blocks by 1.5 to 2.1 ms for each GB, as long as it takes. Staging them costs as much, but
// leaves the SMs alone in between (H200).
constexpr double kMaxKernelBytes = 4 << 20;

// The driver copies pageable memory in the call: only the worker makes such calls.
constexpr double kPageableSeconds = std::numeric_limits<double>::infinity();
// Beside kernels that hold all SMs, a kernel waits for SMs, and copy engines do not. A transfer
// with kernels that took kMinGain times as long as predicted for the best method on such a GPU adds
// kLaunchSeconds for this wait to the predictions for kernels, for kAvoidTimes its duration,
// kMaxAvoidSeconds at most: trying kernels again too early costs several times as much as trying
// too late. Two copies that share the link are both slower, by less than kMinGain.
// Beside a GEMM, 8 blocks of 160 x 8 KiB at a time, of layers at one distance, are stored and
// loaded at 45 GB/s, without this rule at 7 and 10; 32 at a time at 46 instead of 26 and 35 (H200).
constexpr double kMinGain = 2, kAvoidTimes = 100, kMaxAvoidSeconds = 2, kLaunchSeconds = 1e-3;
constexpr double kMinCrowdedSeconds = 100e-6;  // added to what was predicted
constexpr double kUnstagedSeconds = 12e-6;
constexpr size_t kMaxUnstagedRuns = 2;

bool is_by_kernels(CopyMethod method) {
  return method == CopyMethod::kStaged || method == CopyMethod::kKernel;
}

std::vector<CopyMethod> usable(const std::vector<CopyMethod>& available, const Encoding& encoding,
                               bool without_kernels) {
  std::vector<CopyMethod> methods;
  std::copy_if(available.begin(), available.end(), std::back_inserter(methods),
               [&](CopyMethod method) {
                 return encoding.can_use(method) && !(without_kernels && is_by_kernels(method));
               });
  return methods;
}

// A piece, a quarter of the memory at most, has whole slots.
uint64_t least_staging_bytes(const Group& group) {
  constexpr uint64_t kUnit = 2 * kStagingAlignment;
  const uint64_t slot = group.encoding->is_divisible() ? 0 : group.encoding->slot_bytes();
  return std::max(CopyPlanner::kMinStagingBytes, 4 * ((slot + kUnit - 1) / kUnit * kUnit));
}

// The blocks from `first` on, as a part of their own.
TransferPart cut(TransferPart& part, size_t first, const Group& group) {
  TransferPart rest{part.group, part.method, {}, {}};
  for (auto [from, to] : {std::pair(&part.blocks, &rest.blocks), {&part.slots, &rest.slots}}) {
    to->assign(from->begin() + first, from->end());
    from->resize(first);
  }
  rest.after = part.after;
  rest.before = part.before + first * group.block_bytes;
  part.after += rest.blocks.size() * group.block_bytes;
  return rest;
}

// Copies some blocks of a staged transfer of one part where they lie: the first ones of a store,
// while the first piece is packed, and the last ones of a load, while the last piece is unpacked.
// blocks: so many.
void split_head_or_tail(std::vector<TransferPart>& parts, const Group& group, int channel,
                        size_t blocks) {
  TransferPart& all = parts.front();
  const size_t count = all.blocks.size();
  if (all.method != CopyMethod::kStaged || blocks == 0 || count < 2 * blocks) return;
  const bool is_store = channel == kStores;
  parts.push_back(cut(all, is_store ? blocks : count - blocks, group));
  TransferPart& unstaged = is_store ? parts.front() : parts.back();
  unstaged.method = CopyMethod::kStrided;
  unstaged.is_head_or_tail = true;
}

}  // namespace

double fragment_seconds(const std::vector<std::pair<double, double>>& known, double bytes) {
  if (known.empty()) return 0;
  if (bytes <= known.front().first) return known.front().second;
  const auto above = std::upper_bound(known.begin(), known.end(), std::pair(bytes, -1.0));
  const auto [size, seconds] = *std::prev(above);
  if (above == known.end()) return seconds * bytes / size;
  const double share = std::log2(bytes / size) / std::log2(above->first / size);
  return seconds * (1 - share) + above->second * share;
}

MethodChooser::MethodChooser(const CopyMethodOptions& options,
                             const std::vector<CopyMethod>& available,
                             const std::vector<Group>& groups)
    : forced_(options.copy_method),
      max_piece_bytes_(std::max(options.staging_bytes, CopyPlanner::kMinStagingBytes) / 4) {
  for (const Group& group : groups) {
    GroupCosts& fitted = groups_.emplace_back();
    fitted.host_is_pageable = group.host_is_pageable;
    fitted.is_divisible = group.encoding->is_divisible();
    fitted.methods = usable(available, *group.encoding, options.without_kernels);
    fitted.block_bytes = static_cast<double>(group.block_bytes);
    fitted.slabs = group.gpu.count();
    fitted.runs = group.runs.size();
    fitted.first_layer = group.layers.front();
    fitted.last_layer = group.layers.back();
    num_layers_ = std::max(num_layers_, fitted.last_layer + 1);
    const auto slabs = static_cast<double>(fitted.slabs);
    for (int direction = 0; direction < 2; ++direction) {
      for (int method = 0; method < kCopyMethods; ++method) {
        CopyMethodCosts costs = options.costs[direction][method];
        const bool calls_for_each_run = method == static_cast<int>(CopyMethod::kStrided);
        if (calls_for_each_run) costs.block_seconds *= static_cast<double>(fitted.runs);
        costs.block_seconds +=
            slabs * fragment_seconds(costs.fragments, fitted.block_bytes / slabs);
        fitted.costs[direction][method] = costs;
      }
    }
  }
}

double MethodChooser::seconds(CopyMethod method, const GroupCopy& copy) const {
  const int direction = copy.channel == kStores ? 0 : 1;
  const CopyMethodCosts& costs = groups_[copy.group].costs[direction][static_cast<int>(method)];
  if (costs.start_seconds < 0) return std::numeric_limits<double>::infinity();
  const double alone = costs.start_seconds + static_cast<double>(copy.blocks) * costs.block_seconds;
  return copy.is_crowded && is_by_kernels(method) ? alone + kLaunchSeconds : alone;
}

double MethodChooser::submit_seconds(CopyMethod method, const GroupCopy& copy) const {
  const int direction = copy.channel == kStores ? 0 : 1;
  const CopyMethodCosts& costs = groups_[copy.group].costs[direction][static_cast<int>(method)];
  // Each group of layers is a start of its own.
  size_t starts = layer_groups(copy);
  if (method == CopyMethod::kStaged) starts += full_pieces(copy);
  return static_cast<double>(starts) * costs.submit_start_seconds +
         static_cast<double>(copies(method, copy)) * costs.submit_copy_seconds;
}

size_t MethodChooser::layer_groups(const GroupCopy& copy) const {
  const GroupCosts& group = groups_[copy.group];
  const auto number = [&](int64_t layer) {
    return layer_group_of(layer, copy.layer_groups, num_layers_);
  };
  return number(group.last_layer) - number(group.first_layer) + 1;
}

double MethodChooser::block_bytes(const GroupCopy& copy) const {
  return groups_[copy.group].block_bytes / static_cast<double>(layer_groups(copy));
}

size_t MethodChooser::full_pieces(const GroupCopy& copy) const {
  const GroupCosts& group = groups_[copy.group];
  const auto block = static_cast<uint64_t>(std::ceil(block_bytes(copy)));
  const uint64_t unit = piece_unit(block, max_piece_bytes_, group.is_divisible);
  const uint64_t units = std::max(max_piece_bytes_ / unit, uint64_t{1});
  const double bytes = static_cast<double>(copy.blocks) * group.block_bytes;
  return static_cast<size_t>(bytes / static_cast<double>(units * unit));
}

size_t MethodChooser::small_pieces(const GroupCopy& copy) const {
  const double bytes = static_cast<double>(copy.blocks) * block_bytes(copy);
  return num_small_pieces(std::min(static_cast<uint64_t>(bytes), max_piece_bytes_));
}

size_t MethodChooser::copies(CopyMethod method, const GroupCopy& copy) const {
  const GroupCosts& group = groups_[copy.group];
  if (method == CopyMethod::kBatch) return copy.blocks * group.slabs;
  // The layers of a group are copied by themselves, so that runs may be cut.
  if (method == CopyMethod::kStrided)
    return copy.blocks * std::min(group.slabs, group.runs + layer_groups(copy) - 1);
  return copy.blocks * layer_groups(copy);
}

CopyMethod MethodChooser::choose(const GroupCopy& copy) const {
  const GroupCosts& group = groups_[copy.group];
  if (group.host_is_pageable) return CopyMethod::kBatch;
  const double bytes = static_cast<double>(copy.blocks) * group.block_bytes;
  // Expedited loads have no staging buffer, in which they would wait behind other loads.
  const bool is_expedited = copy.channel == kExpedited;
  const bool may_stage = copy.may_launch && copy.may_stage && !is_expedited;
  std::optional<CopyMethod> best;
  double least = std::numeric_limits<double>::infinity();
  for (const CopyMethod method : group.methods) {
    if (method == CopyMethod::kStaged && !may_stage) continue;
    if (method == CopyMethod::kKernel && !copy.may_launch) continue;
    if (forces(method)) return method;
    const bool is_large = method == CopyMethod::kKernel && !is_expedited && bytes > kMaxKernelBytes;
    const double predicted = is_large ? least : seconds(method, copy);
    if (best && predicted >= least) continue;
    least = predicted;
    best = method;
  }
  return best.value();  // only kernel methods are left out, and check_encoding() needs another
}

bool MethodChooser::may_choose(CopyMethod method) const {
  if (forces(method)) return true;
  for (int group = 0; group < static_cast<int>(groups_.size()); ++group) {
    for (const int channel : {kStores, kLoads, kExpedited}) {
      for (size_t blocks = 1; blocks <= 4096; blocks *= 2) {
        if (choose({group, channel, blocks}) == method) return true;
      }
    }
  }
  return false;
}

CopyPlanner::CopyPlanner(std::vector<Group>& groups, Device& device,
                         const CopyMethodOptions& options, const Channels& channels)
    : groups_(groups),
      device_(device),
      options_(options),
      fragments_per_entry_(channels[kStores]->fragments_per_entry()),
      chooser_(options, device.copy_methods(), groups),
      stream_(channels[kStores]->stream()) {
  check_forced_method();
  const Group* demanding = nullptr;  // needs more than copies without kernels
  for (size_t number = 0; number < groups_.size(); ++number) {
    check_encoding(number);
    if (groups_[number].encoding->demand() != nullptr) demanding = &groups_[number];
  }
  try {
    if (demanding != nullptr) set_up_states(channels);
    set_up(channels, demanding != nullptr);
  } catch (const std::bad_alloc&) {
    close();
    throw;
  } catch (const std::exception& error) {
    close();
    has_kernels_ = false;
    slower_copies_ = std::string("kernels would speed up some transfers, but are not available: ") +
                     error.what() + "; the copy engines do all transfers";
    if (demanding != nullptr) {
      fail<ValueError>(demanding->encoding->demand()->option, " cannot be had: ", error.what());
    }
    for (const CopyMethod method : {CopyMethod::kStaged, CopyMethod::kKernel}) {
      if (!chooser_.forces(method)) continue;
      fail<ValueError>(options_.copy_method_setting, " cannot be had: ", error.what());
    }
  }
}

void CopyPlanner::check_forced_method() const {
  if (options_.copy_method < 0) return;
  std::string choices = "auto, copy_engines";
  for (const CopyMethod method : device_.copy_methods()) {
    if (method == static_cast<CopyMethod>(options_.copy_method)) return;
    // The method of host memory cannot be asked for.
    if (method != CopyMethod::kHost) choices += std::string(", ") + copy_method_name(method);
  }
  fail<ValueError>(options_.copy_method_setting, " is no copy method of ", device_.name(),
                   "; it can be ", choices);
}

void CopyPlanner::check_encoding(size_t number) const {
  const Group& group = groups_[number];
  const Encoding& encoding = *group.encoding;
  const Demand* const demand = encoding.demand();
  if (demand == nullptr) return;
  const auto methods = usable(device_.copy_methods(), encoding, /*without_kernels=*/false);
  if (methods.empty()) {
    fail<ValueError>("host pages with ", demand->option, " cannot be used with ", device_.name(),
                     ": this library has no kernels for it; make the pool with ", demand->instead);
  }
  if (group.host_is_pageable) {
    fail<ValueError>("host pages with ", demand->option,
                     " must be pinned, because kernels read and write them; pin the pool, or make "
                     "it with ",
                     demand->instead);
  }
  std::string choices = "auto";
  bool is_possible = options_.copy_method < 0 && !options_.without_kernels;
  for (const CopyMethod method : methods) {
    is_possible |= chooser_.forces(method);
    choices += std::string(", ") + copy_method_name(method);
  }
  if (!is_possible) {
    fail<ValueError>(options_.copy_method_setting, " cannot ", demand->work, " of host pages with ",
                     demand->option, "; pass one of ", choices, ", or make the pool with ",
                     demand->instead);
  }
  const bool stages =
      std::find(methods.begin(), methods.end(), CopyMethod::kStaged) != methods.end();
  const uint64_t least = least_staging_bytes(group);
  if (stages && !encoding.is_divisible() && options_.staging_bytes < least &&
      !chooser_.forces(CopyMethod::kKernel)) {
    fail<ValueError>("staging_bytes=", options_.staging_bytes, " is too little for slots of ",
                     encoding.slot_bytes(), " bytes with ", demand->option, "; give it ", least,
                     " or more");
  }
}

void CopyPlanner::set_up_states(const Channels& channels) {
  states_.emplace(device_, kChannels * SlotStates::kCount);
  for (int channel = 0; channel < kChannels; ++channel) {
    channels[channel]->use_states(states_->states() + channel * SlotStates::kCount);
  }
}

void CopyPlanner::set_up(const Channels& channels, bool needs_kernels) {
  PackKernels* const kernels = device_.pack_kernels();
  if (kernels == nullptr) return;
  const bool stages = chooser_.may_choose(CopyMethod::kStaged);
  if (!stages && !needs_kernels && !chooser_.may_choose(CopyMethod::kKernel)) return;
  kernels->load_kernels();
  make_tables(groups_);
  has_kernels_ = true;
  for (const Group& group : groups_) {
    const bool forced =
        chooser_.forces(CopyMethod::kStaged) || chooser_.forces(CopyMethod::kKernel);
    KVSWAP_CHECK(!forced || group.table != nullptr, "the host pages are not pinned");
  }
  if (!stages) return;
  KVSWAP_CHECK(options_.staging_bytes >= kMinStagingBytes, "staging_bytes=", options_.staging_bytes,
               " is too little; give it ", kMinStagingBytes, " or more");
  allocate_staging(*kernels);
  const uint64_t half = options_.staging_bytes / 512 * 256;  // aligned
  channels[kStores]->use_staging(staging_, half);
  channels[kLoads]->use_staging(staging_ + half, half);
}

// Less than was asked for where the GPU has no more: with a little of it copies are much faster
// than with none.
void CopyPlanner::allocate_staging(PackKernels& kernels) {
  std::string why;  // it is less
  uint64_t least = kMinStagingBytes;
  for (const Group& group : groups_) least = std::max(least, least_staging_bytes(group));
  while (staging_ == 0) {
    try {
      staging_ = kernels.allocate_staging(options_.staging_bytes);
    } catch (const std::exception& error) {
      if (options_.staging_bytes / 2 < least) throw;
      options_.staging_bytes /= 2;
      if (why.empty()) why = error.what();
    }
  }
  if (why.empty()) return;
  slower_copies_ = "transfers beside long kernels are slower with the " +
                   std::to_string(options_.staging_bytes) +
                   " bytes of GPU memory for staging that could be had: " + why;
  chooser_ = MethodChooser(options_, device_.copy_methods(), groups_);
}

void CopyPlanner::make_tables(std::vector<Group>& groups) const {
  for (Group& group : groups) {
    const int64_t slots = group.num_pages * group.blocks_per_page;
    if (group.host_is_pageable) continue;
    group.table = group.encoding->make_table(group.gpu, group.host, group.num_blocks, slots,
                                             device_.index(), stream_);
  }
}

MethodChooser CopyPlanner::prepare(std::vector<Group>& groups) const {
  if (has_kernels_) make_tables(groups);
  return MethodChooser(options_, device_.copy_methods(), groups);
}

CopyMethod CopyPlanner::choose(const Job& job, int group, size_t blocks) const {
  const bool is_crowded = options_.copy_method < 0 && crowded_until_ > job.work->submitted_at;
  const bool may_launch = groups_[group].table != nullptr && !job.work->without_kernels;
  return chooser_.choose(
      {group, job.channel, blocks, job.layer_groups, may_launch, staging_ != 0, is_crowded});
}

void CopyPlanner::plan(Job& job) const noexcept {
  Work& work = *job.work;
  work.is_staged = true;
  work.entries = more_ends(job.layer_groups);
  double seconds = 0;
  for (const JobPart& part : work.parts) {
    const Group& group = groups_[part.group];
    const CopyMethod method = choose(job, part.group, part.count);
    if (&part == &work.parts.front()) job.copy_method = method;
    work.is_staged &= method == CopyMethod::kStaged;
    const MethodChooser::GroupCopy copy{part.group, job.channel, part.count, job.layer_groups};
    work.entries += static_cast<uint32_t>(queue_entries(method, copy));
    seconds += group.host_is_pageable ? kPageableSeconds : chooser_.submit_seconds(method, copy);
  }
  work.predicted_submit_seconds = static_cast<float>(seconds);
}

void CopyPlanner::record_duration(const Transfer& transfer, double seconds) noexcept {
  double predicted = kMinCrowdedSeconds;
  bool launched = false;
  for (const TransferPart& part : transfer.parts) {
    const std::vector<CopyMethod>& methods = chooser_.methods(part.group);
    const bool had_choice = !std::all_of(methods.begin(), methods.end(), is_by_kernels);
    launched |= is_by_kernels(part.method) && had_choice;
    const int channel = transfer.jobs.front().channel;
    MethodChooser::GroupCopy crowded{part.group, channel, part.blocks.size()};
    crowded.is_crowded = true;
    predicted += chooser_.seconds(chooser_.choose(crowded), crowded);
  }
  if (!launched || seconds < kMinGain * predicted) return;
  crowded_until_ = now() + std::min(kAvoidTimes * seconds, kMaxAvoidSeconds);
}

std::vector<TransferPart> CopyPlanner::parts_of(const JobList& jobs, bool is_alone) const {
  std::vector<TransferPart> parts;
  std::vector<size_t> place(groups_.size(), groups_.size());  // of each group in `parts`
  for (const Job& job : jobs) {
    const int64_t *blocks = job.work->blocks(), *slots = job.work->slots();
    for (const JobPart& part : job.work->parts) {
      if (place[part.group] == groups_.size()) {
        place[part.group] = parts.size();
        parts.push_back({part.group, CopyMethod::kHost, {}, {}});
      }
      TransferPart& all = parts[place[part.group]];
      all.blocks.insert(all.blocks.end(), blocks, blocks + part.count);
      all.slots.insert(all.slots.end(), slots, slots + part.count);
      blocks += part.count;
      slots += part.count;
    }
  }
  const Job& first = jobs.front();
  for (TransferPart& part : parts) part.method = choose(first, part.group, part.blocks.size());
  // A load that others precede is unpacked while they are on the link.
  const bool has_head_or_tail =
      parts.size() == 1 && first.layer_groups == 1 && (is_alone || first.channel == kStores);
  if (has_head_or_tail) {
    const int group = parts.front().group;
    split_head_or_tail(parts, groups_[group], first.channel, unstaged_blocks(group, first.channel));
  }
  return parts;
}

// As many blocks as the link copies in the time that it takes to launch a kernel.
size_t CopyPlanner::unstaged_blocks(int group, int channel) const {
  const bool is_few = groups_[group].runs.size() <= kMaxUnstagedRuns;
  if (!is_few || !groups_[group].encoding->can_use(CopyMethod::kStrided)) return 0;
  const auto seconds = [&](size_t blocks) {
    return chooser_.seconds(CopyMethod::kStrided, {group, channel, blocks});
  };
  const double each = seconds(2) - seconds(1);
  return each > 0 ? static_cast<size_t>(std::ceil(kUnstagedSeconds / each)) : 1;
}

size_t CopyPlanner::entries_of(const std::vector<TransferPart>& parts, int layer_groups) const {
  size_t entries = more_ends(layer_groups);
  for (const TransferPart& part : parts) {
    entries += queue_entries(part.method, {part.group, 0, part.blocks.size(), layer_groups});
  }
  return entries;
}

// Entries of the driver's queue that the copies take: a limit of the driver, not a cost.
size_t CopyPlanner::queue_entries(CopyMethod method, const MethodChooser::GroupCopy& copy) const {
  const size_t copies = chooser_.copies(method, copy), groups = chooser_.layer_groups(copy);
  if (method == CopyMethod::kStaged) {
    const size_t more_small_pieces = (groups - 1) * chooser_.small_pieces(copy);
    return kSmallPieces + kEntriesPerPiece * (chooser_.full_pieces(copy) + more_small_pieces) +
           copies / fragments_per_entry_;
  }
  if (method == CopyMethod::kKernel) return groups * (1 + copy.blocks / kPackBlocks);
  if (method == CopyMethod::kBatch) return groups + copies / fragments_per_entry_;
  if (method == CopyMethod::kHost) return groups;  // no driver
  return copies;
}

void CopyPlanner::leak() noexcept {
  for (Group& group : groups_) {
    if (group.table != nullptr) group.table->leak();
  }
  staging_ = 0;
  if (states_) states_->leak();
}

void CopyPlanner::close() {
  for (Group& group : groups_) group.table.reset();
  if (staging_ != 0) device_.pack_kernels()->free_staging(staging_);
  staging_ = 0;
  states_.reset();
}

}  // namespace kvswap
