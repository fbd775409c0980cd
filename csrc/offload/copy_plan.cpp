#include "offload/copy_plan.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <exception>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

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

// The rule. Its figures are of H200 and H100 with PCIe 5.0 x16; benchmarks/copy_methods.py compares
// it with each method.
//
// A kernel that waits for the link slows down the compute beside it all the while. Staging the same
// bytes takes about as long, and leaves the SMs alone in between. So kernels copy small loads only,
// which somebody waits for: small stores by kernel cost a decode GEMM 5.6 to 6.8 ms per GB, staged
// 2.1 to 2.7, strided 1 to 1.5 (H100).
constexpr uint64_t kSmallBytes = 4 << 20;
// The most strided copies of a small store.
constexpr size_t kMaxStridedStores = 16;
// The driver copies fragments of 512 KiB at 50 GB/s and of 2 MiB at 53; staged, both go at 54
// (H200).
constexpr uint64_t kLargeFragmentBytes = 1 << 20;
// Submitting a strided call takes as long as this many fragments of a batch.
constexpr size_t kSlabsPerStridedCall = 4;
// So few copies put a single block, or the head or tail of a staged transfer, on the link sooner
// than a kernel does.
constexpr size_t kMaxUnstagedRuns = 2;
// What the link copies in the 12 us that it takes to launch a kernel.
constexpr uint64_t kUnstagedBytes = 512 << 10;

// Beside kernels that hold all SMs, a kernel waits for SMs, and copy engines do not. After a
// transfer with kernels that took kMinGain times as long as the link needs, copy engines copy what
// takes them no longer than that wait of about 1 ms, for kAvoidTimes its duration, kMaxAvoidSeconds
// at most: trying kernels again too early costs several times as much as trying too late. Two
// copies that share the link are both slower, by less than kMinGain. Beside a GEMM, 8 blocks of 160
// x 8 KiB at a time, of layers at one distance, are stored and loaded at 45 GB/s, by kernels at 7
// and 10; 32 at a time at 46 instead of 26 and 35; 102 at a time faster by staging, at 53 instead
// of 47 (H200).
constexpr double kMinGain = 2, kAvoidTimes = 100, kMaxAvoidSeconds = 2;
constexpr uint64_t kMaxCrowdedBytes = 64 << 20;
constexpr size_t kMaxCrowdedFragments = 512;
// Added to the time that the link needs.
constexpr double kMinCrowdedSeconds = 100e-6;
// The rate of the link is the fastest that was seen in transfers of at least this many bytes:
// smaller ones take longer to start than to copy. It begins as that of a slow link.
constexpr double kMinRateBytes = 4 << 20, kSlowLink = 10e9;

// The driver copies pageable memory in the call: only the worker makes such calls.
constexpr double kPageableSeconds = std::numeric_limits<double>::infinity();
// What a thread takes to submit a transfer, a further piece of it or a further layer group, and
// what it takes for each copy, as MethodChooser::copies() counts them (H200).
struct SubmitSeconds {
  double start, copy;
};
constexpr SubmitSeconds submit_seconds_of(CopyMethod method) {
  switch (method) {
    case CopyMethod::kBatch:
      return {2e-6, 0.6e-6};
    case CopyMethod::kStrided:
      return {1e-6, 2e-6};
    case CopyMethod::kStaged:
      return {8e-6, 1.15e-6};
    case CopyMethod::kKernel:
      return {5e-6, 0.1e-6};
    default:
      return {};  // there is no choice, and nothing to submit
  }
}

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

// Copies `blocks` blocks of a staged transfer of one part where they lie: the first ones of a
// store, while the first piece is packed, or the last ones of a load, while the last piece is
// unpacked.
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

// "'auto', 'staged' or 'kernel'", as in errors of Python.
std::string one_of(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    const char* const between = i == 0 ? "" : i + 1 < names.size() ? ", " : " or ";
    text += between + ("'" + names[i] + "'");
  }
  return text;
}

}  // namespace

std::array<CopyMethod, 4> preferred_methods(const RuleInput& input) {
  const uint64_t bytes = input.blocks * input.block_bytes;
  const bool is_single = input.blocks == 1;
  const bool saves_calls = input.slabs >= kSlabsPerStridedCall * input.runs;
  const bool is_strided = input.runs < input.fragments &&
                          (saves_calls || (is_single && input.runs <= kMaxUnstagedRuns));
  const bool is_one_copy = is_single && std::min(input.runs, input.fragments) <= kMaxUnstagedRuns;
  const bool has_large_fragments = input.block_bytes / input.fragments >= kLargeFragmentBytes;
  const bool is_crowded_out =
      input.is_crowded && bytes <= kMaxCrowdedBytes &&
      (is_strided || input.blocks * input.fragments <= kMaxCrowdedFragments);
  const bool is_small = bytes <= kSmallBytes;
  const bool is_small_store =
      input.is_store && is_small && is_strided && input.blocks * input.runs <= kMaxStridedStores;
  const bool by_engines = is_crowded_out || (!input.is_relayed && (is_one_copy || is_small_store));

  const bool by_one_kernel = input.is_expedited || (is_small && !input.is_store);
  const auto kernels = by_one_kernel ? std::array{CopyMethod::kKernel, CopyMethod::kStaged}
                                     : std::array{CopyMethod::kStaged, CopyMethod::kKernel};
  const auto engines = is_strided ? std::array{CopyMethod::kStrided, CopyMethod::kBatch}
                                  : std::array{CopyMethod::kBatch, CopyMethod::kStrided};
  // Without staging memory, a kernel copies many bytes only if nothing else can.
  if (by_engines) return {engines[0], engines[1], kernels[0], kernels[1]};
  // Blocks with checksums cannot be in a batch, and strided those of 2 MiB took 12 % longer (H200).
  if (has_large_fragments && !input.is_relayed)
    return {engines[0], kernels[0], engines[1], kernels[1]};
  return {kernels[0], engines[0], engines[1], kernels[1]};
}

MethodChooser::MethodChooser(const CopyMethodOptions& options,
                             const std::vector<CopyMethod>& available,
                             const std::vector<Group>& groups)
    : forced_(options.copy_method) {
  const uint64_t staging = std::max(options.staging_bytes, CopyPlanner::kMinStagingBytes);
  max_piece_bytes_ = staging / 4;
  if (!options.relays.empty()) {
    max_piece_bytes_ = max_relayed_piece_bytes(staging, 1 + options.relays.size());
    min_relayed_bytes_ = static_cast<double>(min_relayed_bytes(staging));
  }
  for (const Group& group : groups) {
    groups_.push_back({group.host_is_pageable,
                       group.encoding->is_divisible(),
                       usable(available, *group.encoding, options.without_kernels),
                       {group.block_bytes, group.gpu.count(), group.runs.size(), group.fragments},
                       group.layers.front(),
                       group.layers.back()});
    num_layers_ = std::max(num_layers_, group.layers.back() + 1);
  }
}

double MethodChooser::submit_seconds(CopyMethod method, const GroupCopy& copy) const {
  const SubmitSeconds seconds = submit_seconds_of(method);
  // Each group of layers is a start of its own.
  size_t starts = layer_groups(copy);
  if (method == CopyMethod::kStaged) starts += full_pieces(copy);
  return static_cast<double>(starts) * seconds.start +
         static_cast<double>(copies(method, copy)) * seconds.copy;
}

size_t MethodChooser::layer_groups(const GroupCopy& copy) const {
  const Shape& group = groups_[copy.group];
  const auto number = [&](int64_t layer) {
    return layer_group_of(layer, copy.layer_groups, num_layers_);
  };
  return number(group.last_layer) - number(group.first_layer) + 1;
}

double MethodChooser::block_bytes(const GroupCopy& copy) const {
  return static_cast<double>(groups_[copy.group].block.block_bytes) /
         static_cast<double>(layer_groups(copy));
}

size_t MethodChooser::full_pieces(const GroupCopy& copy) const {
  const Shape& group = groups_[copy.group];
  const auto block = static_cast<uint64_t>(std::ceil(block_bytes(copy)));
  const uint64_t unit = piece_unit(block, max_piece_bytes_, group.is_divisible);
  const uint64_t units = std::max(max_piece_bytes_ / unit, uint64_t{1});
  return copy.blocks * group.block.block_bytes / (units * unit);
}

size_t MethodChooser::small_pieces(const GroupCopy& copy) const {
  const double bytes = static_cast<double>(copy.blocks) * block_bytes(copy);
  return num_small_pieces(std::min(static_cast<uint64_t>(bytes), max_piece_bytes_));
}

size_t MethodChooser::copies(CopyMethod method, const GroupCopy& copy) const {
  const RuleInput& block = groups_[copy.group].block;
  // The layers of a layer group are copied by themselves, which may divide a run or a fragment.
  const size_t cuts = layer_groups(copy) - 1;
  if (method == CopyMethod::kBatch)
    return copy.blocks * std::min(block.slabs, block.fragments + cuts);
  if (method == CopyMethod::kStrided) return copy.blocks * std::min(block.slabs, block.runs + cuts);
  return copy.blocks * (cuts + 1);
}

CopyMethod MethodChooser::choose(const GroupCopy& copy) const {
  const Shape& group = groups_[copy.group];
  if (group.host_is_pageable) return CopyMethod::kBatch;
  // Expedited loads have no staging buffer, in which they would wait behind other loads.
  const bool is_expedited = copy.channel == kExpedited;
  const auto is_available = [&](CopyMethod method) {
    if (is_by_kernels(method) && !copy.may_launch) return false;
    if (method == CopyMethod::kStaged && (!copy.may_stage || is_expedited)) return false;
    return std::find(group.methods.begin(), group.methods.end(), method) != group.methods.end();
  };
  if (forced_ >= 0 && is_available(static_cast<CopyMethod>(forced_))) {
    return static_cast<CopyMethod>(forced_);
  }
  RuleInput input = group.block;
  input.fragments = copies(CopyMethod::kBatch, {copy.group, copy.channel, 1, copy.layer_groups});
  input.blocks = copy.blocks;
  input.is_store = copy.channel == kStores;
  input.is_expedited = is_expedited;
  input.is_crowded = copy.is_crowded;
  input.is_relayed = static_cast<double>(copy.blocks) * block_bytes(copy) >= min_relayed_bytes_;
  for (const CopyMethod method : preferred_methods(input)) {
    if (is_available(method)) return method;
  }
  return group.methods.front();  // that of a device that has no other
}

bool MethodChooser::may_choose(CopyMethod method) const {
  if (forces(method)) return true;
  for (int group = 0; group < static_cast<int>(groups_.size()); ++group) {
    for (const int channel : {kStores, kLoads, kExpedited}) {
      for (const int layer_groups : {1, static_cast<int>(num_layers_)}) {
        for (size_t blocks = 1; blocks <= 1 << 20; blocks *= 2) {
          if (choose({group, channel, blocks, layer_groups}) == method) return true;
        }
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
      fastest_{kSlowLink, kSlowLink},
      stream_(channels[kStores]->stream()) {
  check_forced_method();
  const Group* demanding = nullptr;  // needs more than copies without kernels
  for (const Group& group : groups_) {
    check_encoding(group);
    if (group.encoding->demand() != nullptr) demanding = &group;
  }
  try {
    if (demanding != nullptr) set_up_states(channels);
    set_up(channels, demanding != nullptr);
    if (staging_ == 0 && !options_.relays.empty())
      slower_copies_ = "relays are not used: no copy is staged";
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
  std::vector<std::string> choices = {"auto", "copy_engines"};
  for (const CopyMethod method : device_.copy_methods()) {
    if (method == static_cast<CopyMethod>(options_.copy_method)) return;
    // The method of host memory cannot be asked for.
    if (method != CopyMethod::kHost) choices.push_back(copy_method_name(method));
  }
  fail<ValueError>(options_.copy_method_setting, " cannot be used with ", device_.name(),
                   "; it must be ", one_of(choices));
}

void CopyPlanner::check_encoding(const Group& group) const {
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
  std::vector<std::string> choices = {"auto"};
  bool is_possible = options_.copy_method < 0 && !options_.without_kernels;
  for (const CopyMethod method : methods) {
    is_possible |= chooser_.forces(method);
    if (method != CopyMethod::kHost) choices.push_back(copy_method_name(method));
  }
  if (!is_possible) {
    fail<ValueError>(options_.copy_method_setting, " cannot ", demand->work, " of host pages with ",
                     demand->option, "; it must be ", one_of(choices), ", or make the pool with ",
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
  constexpr size_t kBytes = kChannels * SlotStates::kCount;
  states_ = static_cast<uint8_t*>(device_.allocate_host(kBytes));
  std::memset(states_, 0, kBytes);
  for (int channel = 0; channel < kChannels; ++channel) {
    channels[channel]->use_states(states_ + channel * SlotStates::kCount);
  }
}

void CopyPlanner::set_up(const Channels& channels, bool needs_kernels) {
  PackKernels* const kernels = device_.pack_kernels();
  if (kernels == nullptr) return;
  const bool may_exchange =
      options_.may_exchange && options_.copy_method < 0 && !options_.without_kernels;
  const bool stages = chooser_.may_choose(CopyMethod::kStaged) || may_exchange;
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
  add_relays(*kernels, channels);
}

// Without those whose memory cannot be had.
void CopyPlanner::add_relays(PackKernels& kernels, const Channels& channels) {
  // Four pieces for each direction.
  const uint64_t half = options_.staging_bytes / (1 + options_.relays.size()) / 512 * 256;
  for (const int device : options_.relays) {
    uint64_t address = 0;
    try {
      relays_.reserve(options_.relays.size());
      address = kernels.allocate_staging(device, 2 * half);
      channels[kStores]->add_relay(device, address, half);
      channels[kLoads]->add_relay(device, address + half, half);
      relays_.push_back({device, address});
    } catch (const std::exception& error) {
      for (const int channel : {kStores, kLoads}) channels[channel]->remove_relay(device);
      if (address != 0) kernels.free_staging(device, address);
      slower_copies_ += std::string(slower_copies_.empty() ? "" : "; ") + "relay " +
                        std::to_string(device) + " is not used: " + error.what();
    }
  }
}

// Less than was asked for where the GPU has no more: with a little of it copies are much faster
// than with none.
void CopyPlanner::allocate_staging(PackKernels& kernels) {
  std::string why;  // it is less
  uint64_t least = kMinStagingBytes;
  for (const Group& group : groups_) least = std::max(least, least_staging_bytes(group));
  while (staging_ == 0) {
    try {
      staging_ = kernels.allocate_staging(device_.index(), options_.staging_bytes);
    } catch (const std::exception& error) {
      if (options_.staging_bytes / 2 < least) throw;
      options_.staging_bytes /= 2;
      if (why.empty()) why = error.what();
    }
  }
  if (why.empty()) return;
  slower_copies_ = "transfers are slower while long kernels run, with the " +
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
  for (const Group& group : groups) check_encoding(group);
  if (has_kernels_) make_tables(groups);
  return MethodChooser(options_, device_.copy_methods(), groups);
}

CopyMethod CopyPlanner::choose(const Job& job, int group, size_t blocks) const {
  if (job.work->is_exchanged) return CopyMethod::kStaged;
  const bool is_crowded = options_.copy_method < 0 && crowded_until_ > job.work->submitted_at;
  const bool may_launch = groups_[group].table != nullptr;
  return chooser_.choose(
      {group, job.channel, blocks, job.layer_groups, may_launch, staging_ != 0, is_crowded});
}

bool CopyPlanner::join_exchange(const std::shared_ptr<Exchange>& exchange, Channel& loads,
                                uint64_t pools, double seconds) {
  exchange_ = exchange;
  if (!exchange->has_ring()) {
    const bool can =
        staging_ != 0 && std::all_of(groups_.begin(), groups_.end(),
                                     [](const auto& of) { return of.table != nullptr; });
    KVSWAP_CHECK(can, "no copy is staged, or the host pages are not pinned");
    loads.use_exchange(exchange, place_bytes());
  }
  return exchange->join(describe_groups(mix_hash(pools, options_.staging_bytes)), seconds);
}

// Their pages, and how loads are cut.
uint64_t CopyPlanner::describe_groups(uint64_t hash) const {
  for (const Group& group : groups_) {
    hash = mix_hash(hash, static_cast<uint64_t>(group.num_pages * group.blocks_per_page));
    hash = mix_hash(hash, group.encoding->slot_bytes());
    for (const uint64_t size : group.gpu.sizes) hash = mix_hash(hash, size);
    for (const int64_t layer : group.layers) hash = mix_hash(hash, static_cast<uint64_t>(layer));
  }
  return hash;
}

// Depends on the job and on what the ranks have compared, nothing else: all decide alike. Each has
// at least one piece.
bool CopyPlanner::exchanges(const Job& job) const {
  if (exchange_ == nullptr || !exchange_->is_open()) return false;
  if (job.channel != kLoads) return false;
  uint64_t bytes = 0;
  bool has_enough_blocks = false;
  for (const JobPart& part : job.work->parts) {
    const Group& group = groups_[part.group];
    const uint64_t block_bytes = group.encoding->packed_bytes({0, group.gpu.count()});
    if (!group.encoding->is_divisible() && block_bytes > place_bytes()) return false;
    bytes += part.count * block_bytes;
    has_enough_blocks |= part.count >= static_cast<size_t>(exchange_->ranks());
  }
  return has_enough_blocks && bytes >= place_bytes();
}

void CopyPlanner::plan(Job& job) const noexcept {
  Work& work = *job.work;
  work.is_exchanged = exchanges(job);
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
  work.submit_seconds = static_cast<float>(seconds);
  if (!work.is_exchanged) return;
  // Rounded to whole blocks, pieces have at least half of the bytes that they should have.
  const size_t least = work.parts.size() * job.layer_groups * exchange_->ranks();
  const size_t pieces = 2 * (job.nbytes / place_bytes() + least * kMinExchangedPieces);
  work.entries += static_cast<uint32_t>((1 + kEntriesPerPiece) * pieces);
}

void CopyPlanner::record_duration(const Transfer& transfer, double seconds) noexcept {
  if (transfer.is_exchanged()) return;  // it waits for other ranks
  double bytes = 0;
  bool launched = false;
  for (const TransferPart& part : transfer.parts) {
    const std::vector<CopyMethod>& methods = chooser_.methods(part.group);
    const bool had_choice = !std::all_of(methods.begin(), methods.end(), is_by_kernels);
    launched |= is_by_kernels(part.method) && had_choice;
    const Encoding& encoding = *groups_[part.group].encoding;
    const uint64_t packed = encoding.packed_bytes({0, groups_[part.group].gpu.count()});
    bytes += static_cast<double>(part.blocks.size() * packed);
  }
  double& fastest = fastest_[transfer.jobs.front().channel == kStores ? 0 : 1];
  const bool is_by_one_link = relays_.empty() || bytes < min_relayed_bytes(options_.staging_bytes);
  if (bytes >= kMinRateBytes && seconds > 0 && is_by_one_link) {
    fastest = std::max(fastest, bytes / seconds);
  }
  if (!launched || seconds < kMinGain * (bytes / fastest + kMinCrowdedSeconds)) return;
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
  const bool has_head_or_tail = !first.work->is_exchanged && parts.size() == 1 &&
                                first.layer_groups == 1 && (is_alone || first.channel == kStores);
  if (has_head_or_tail) {
    const int group = parts.front().group;
    split_head_or_tail(parts, groups_[group], first.channel, unstaged_blocks(group));
  }
  return parts;
}

size_t CopyPlanner::unstaged_blocks(int group) const {
  const bool is_few = groups_[group].runs.size() <= kMaxUnstagedRuns;
  if (!is_few || !groups_[group].encoding->can_use(CopyMethod::kStrided)) return 0;
  const uint64_t block = groups_[group].block_bytes;
  return (kUnstagedBytes + block - 1) / block;
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
  relays_.clear();
  if (exchange_ != nullptr) exchange_->close();
  states_ = nullptr;
}

void CopyPlanner::close() {
  for (Group& group : groups_) group.table.reset();
  if (staging_ != 0) device_.pack_kernels()->free_staging(device_.index(), staging_);
  staging_ = 0;
  for (const auto& [device, address] : relays_)
    device_.pack_kernels()->free_staging(device, address);
  relays_.clear();
  if (exchange_ != nullptr) exchange_->close();
  try {
    if (states_ != nullptr) device_.free_host(states_);
  } catch (const std::exception&) {  // the driver still has them
  }
  states_ = nullptr;
}

}  // namespace kvswap
