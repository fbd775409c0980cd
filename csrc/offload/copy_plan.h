#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "capi.h"
#include "offload/channel.h"
#include "offload/group.h"

namespace kvswap {

// Chooses a transfer's copy method: of those available, the one that is predicted to end first.
class MethodChooser {
 public:
  MethodChooser(const kvswap_path_options& options, const std::vector<Group>& groups);

  struct Transfer {
    int group, channel;
    size_t blocks;
    bool may_launch = true;  // kernels
    bool may_stage = true;   // in a buffer that is there
  };
  CopyMethod choose(const Transfer& transfer) const;
  // Infinite for a copy method whose figures are not known.
  double seconds(CopyMethod method, const Transfer& transfer) const;

  // Whether any transfer would take this copy method.
  bool wants(CopyMethod method) const;
  bool forces(CopyMethod method) const { return forced_ == static_cast<int>(method); }

 private:
  struct Group {
    bool host_is_pageable;
    double block_bytes;
    kvswap_path_costs costs[2][KVSWAP_PATHS];  // block_seconds: of all fragments, too
  };

  int forced_;
  std::vector<Group> groups_;
};

// Says how jobs are copied, and owns what that takes on the GPU: tables of slabs, and the memory
// of the staging buffers. The context of the device is current.
class CopyPlanner {
 public:
  static constexpr uint64_t kFewestStagingBytes = 1 << 20;

  // device: -1 where both sides are host memory. Gives the groups their tables and the channels
  // their buffers, where some transfer would use them. Throws ValueError where a forced copy method
  // cannot be had.
  CopyPlanner(std::vector<Group>& groups, int device, const kvswap_path_options& options,
              Channel& stores, Channel& loads);
  ~CopyPlanner() { close(); }

  // Why copy methods that would be chosen cannot be had, or "".
  const std::string& problem() const { return problem_; }

  // For groups that have moved, before rebind(), which cannot fail: gives them their tables, and
  // says which way is best for them.
  MethodChooser prepare(std::vector<Group>& groups) const;
  void rebind(MethodChooser chooser) noexcept { chooser_ = std::move(chooser); }

  // Fills in what copying the job alone takes: the copy method of its first group, entries of the
  // driver's queue, time of the thread that submits it.
  void plan(Job& job) const noexcept;

  // What a transfer of these jobs copies. is_alone: no other is in flight in the channel.
  std::vector<TransferPart> parts_of(const JobRow& jobs, bool is_alone) const;
  size_t entries_of(const std::vector<TransferPart>& parts) const;

  // A transfer has taken so long on the device. Kernels that are held up by those of the compute
  // can make it slower than the copy engines alone would be; then those take over for a while.
  void note(const Transfer& transfer, double seconds) noexcept;

  // Frees the memory; nothing runs any more.
  void close();
  // Leaves it where it is: the device is lost, and nobody knows what still runs.
  void leave() noexcept;

 private:
  void set_up(Channel& stores, Channel& loads);
  void make_tables(std::vector<Group>& groups) const;
  CopyMethod choose(const Job& job, int group, size_t blocks) const;
  size_t unstaged_blocks(const Job& job) const;
  double without_kernels(const MethodChooser::Transfer& transfer) const;  // seconds

  std::vector<Group>& groups_;
  const int device_;
  const kvswap_path_options options_;
  MethodChooser chooser_;
  std::string problem_;
  double crowded_until_ = 0;  // the GPU, by kernels of others
  bool has_kernels_ = false;
  const cuda::Stream stream_;  // to upload tables
  cuda::Address staging_ = 0;
};

// Leaves what would cost the submitting thread more than `seconds`. Returns the first part of that;
// the number of parts where nothing is left.
size_t split_remainder(std::vector<TransferPart>& parts, const Group& group, double seconds);

}  // namespace kvswap
