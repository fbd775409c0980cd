#pragma once

#include <array>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "copy/copy_method.h"
#include "offload/channel.h"
#include "offload/group.h"

namespace kvswap {

// What the rule looks at: the blocks of one group in a transfer, before it asks what is available.
struct RuleInput {
  uint64_t block_bytes;
  // Of a block: slabs, runs of slabs at equal distances, and pieces that are contiguous in the
  // cache and on the host.
  size_t slabs, runs, fragments;
  size_t blocks = 0;
  bool is_store = false;
  bool is_expedited = false;
  bool is_crowded = false;  // other kernels keep the GPU busy
  bool is_relayed = false;  // other links take part if the blocks are staged
};

// Copy methods by preference: the first one that is available is taken.
std::array<CopyMethod, 4> preferred_methods(const RuleInput& input);

// Chooses the copy method of a group's blocks, and counts what it gives to the driver.
class MethodChooser {
 public:
  // available: the device's copy methods. The options may exclude kernels.
  MethodChooser(const CopyMethodOptions& options, const std::vector<CopyMethod>& available,
                const std::vector<Group>& groups);

  // The blocks of one group in a transfer, which copies its layers in `layer_groups` parts, one
  // after another.
  struct GroupCopy {
    int group, channel;
    size_t blocks;
    int layer_groups = 1;
    bool may_launch = true;   // kernels may copy
    bool may_stage = true;    // the channel has a staging buffer
    bool is_crowded = false;  // other kernels keep the GPU busy
  };
  CopyMethod choose(const GroupCopy& copy) const;
  // Seconds that a thread is expected to take to submit it.
  double submit_seconds(CopyMethod method, const GroupCopy& copy) const;
  // How many of the transfer's layer groups have layers of these blocks.
  size_t layer_groups(const GroupCopy& copy) const;
  // How many pieces of the largest size these blocks have when they are staged.
  size_t full_pieces(const GroupCopy& copy) const;
  // How many smaller ones they have in each layer group.
  size_t small_pieces(const GroupCopy& copy) const;
  // How many copies the driver is given: fragments ("batch"), runs of slabs of each block
  // ("strided") or blocks (other methods), in each layer group.
  size_t copies(CopyMethod method, const GroupCopy& copy) const;

  // Whether this copy method would be chosen for some number of blocks and of layer groups.
  bool may_choose(CopyMethod method) const;
  // What the group can be copied by.
  const std::vector<CopyMethod>& methods(size_t group) const { return groups_[group].methods; }
  // Whether the caller has asked for this copy method.
  bool forces(CopyMethod method) const { return forced_ == static_cast<int>(method); }

 private:
  // In each layer group. What is staged there passes through the buffer by itself.
  double block_bytes(const GroupCopy& copy) const;

  struct Shape {
    bool host_is_pageable, is_divisible;
    std::vector<CopyMethod> methods;  // of the device and of the group's encoding
    RuleInput block;
    int64_t first_layer, last_layer;
  };

  int forced_;
  uint64_t max_piece_bytes_;  // of a staged copy
  // Of a transfer in which relays take part.
  double min_relayed_bytes_ = std::numeric_limits<double>::infinity();
  int64_t num_layers_ = 0;  // of the model, in all groups together
  std::vector<Shape> groups_;
};

// Plans how jobs are copied, and owns the GPU memory for it: the tables of slabs and the staging
// buffers. The scheduler's lock guards it. The context of the device is current.
class CopyPlanner {
 public:
  static constexpr uint64_t kMinStagingBytes = 1 << 20;

  using Channels = std::array<Channel*, kChannels>;

  // Gives the groups their tables and the channels their staging buffers, if some transfer would
  // use them, and slot states if some group can reject blocks. Throws ValueError when the device
  // does not have the forced copy method, or when that is not available, or when the encoding of a
  // group has no method there.
  CopyPlanner(std::vector<Group>& groups, Device& device, const CopyMethodOptions& options,
              const Channels& channels);
  ~CopyPlanner() { close(); }

  // Why some copies are slower than they could be, and how they are made, or "".
  const std::string& slower_copies() const { return slower_copies_; }

  // The part of rebinding that may throw: gives the new groups their tables, and returns a chooser
  // for them, for rebind().
  MethodChooser prepare(std::vector<Group>& groups) const;
  void rebind(MethodChooser chooser) noexcept { chooser_ = std::move(chooser); }

  // Sets what it takes to copy this job alone, as far as is known now: the copy method of its first
  // group, its entries in the driver's queue, and the seconds that submitting it takes.
  void plan(Job& job) const noexcept;

  // Large loads are exchanged as long as this is open. pools: a hash of what the groups' pools are.
  // See Exchange::join(). Also throws if nothing can be exchanged.
  bool join_exchange(const std::shared_ptr<Exchange>& exchange, Channel& loads, uint64_t pools,
                     double seconds);
  // Null if no other rank was to be joined.
  Exchange* exchange() const { return exchange_.get(); }

  // The parts of a transfer of these jobs. is_alone: no other is in flight in the channel.
  std::vector<TransferPart> parts_of(const JobList& jobs, bool is_alone) const;
  size_t entries_of(const std::vector<TransferPart>& parts, int layer_groups) const;

  // To be called with the time that each transfer took on the device. If one with kernels took much
  // longer than the link needs for it, methods are chosen for a crowded GPU for a while.
  void record_duration(const Transfer& transfer, double seconds) noexcept;

  // Frees the memory. Nothing runs any more.
  void close();
  // Instead of close(), on a lost device: it may still use the memory, which is never freed.
  void leak() noexcept;

 private:
  struct RelayMemory {
    int device;
    uint64_t address;
  };

  void check_forced_method() const;
  void check_encoding(const Group& group) const;
  // needs_kernels: also if no method is by them.
  void set_up(const Channels& channels, bool needs_kernels);
  void allocate_staging(PackKernels& kernels);
  void add_relays(PackKernels& kernels, const Channels& channels);
  void set_up_states(const Channels& channels);
  void make_tables(std::vector<Group>& groups) const;
  CopyMethod choose(const Job& job, int group, size_t blocks) const;
  uint64_t place_bytes() const { return exchanged_place_bytes(options_.staging_bytes); }
  uint64_t describe_groups(uint64_t hash) const;
  bool exchanges(const Job& job) const;
  size_t unstaged_blocks(int group) const;
  size_t queue_entries(CopyMethod method, const MethodChooser::GroupCopy& copy) const;

  std::vector<Group>& groups_;
  Device& device_;
  CopyMethodOptions options_;  // staging_bytes: what could be allocated
  const size_t fragments_per_entry_;
  MethodChooser chooser_;
  std::string slower_copies_;
  double crowded_until_ = 0;  // until then other kernels keep the GPU busy
  double fastest_[2];         // bytes per second of a store and of a load: the most seen so far
  bool has_kernels_ = false;
  const Stream stream_;  // to upload tables
  uint64_t staging_ = 0;
  std::vector<RelayMemory> relays_;
  std::shared_ptr<Exchange> exchange_;
  uint8_t* states_ = nullptr;  // of slots; null if no group can reject blocks
};

}  // namespace kvswap
