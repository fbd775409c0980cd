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
  // available: by the device; the first is taken where none has figures.
  MethodChooser(const kvswap_copy_method_options& options, const std::vector<CopyMethod>& available,
                const std::vector<Group>& groups);

  struct Transfer {
    int group, channel;
    size_t blocks;
    bool may_launch = true;  // kernels may copy
    bool may_stage = true;   // the channel has a staging buffer
  };
  CopyMethod choose(const Transfer& transfer) const;
  // Predicted seconds; infinite for a copy method without figures.
  double seconds(CopyMethod method, const Transfer& transfer) const;

  // Whether some transfer would take this copy method.
  bool wants(CopyMethod method) const;
  // Whether every transfer takes this copy method.
  bool forces(CopyMethod method) const { return forced_ == static_cast<int>(method); }

 private:
  struct Group {
    bool host_is_pageable;
    double block_bytes;
    kvswap_copy_method_costs costs[2][KVSWAP_COPY_METHODS];  // block_seconds includes the fragments
  };

  int forced_;
  std::vector<CopyMethod> available_;
  std::vector<Group> groups_;
};

// Plans how jobs are copied, and owns the GPU memory for it: the tables of slabs and the staging
// buffers. The scheduler's lock guards it. The context of the device is current.
class CopyPlanner {
 public:
  static constexpr uint64_t kMinStagingBytes = 1 << 20;

  // Gives the groups their tables and the channels
  // their staging buffers, if some transfer would use them. Throws ValueError when a forced copy
  // method is not available.
  CopyPlanner(std::vector<Group>& groups, Device& device, const kvswap_copy_method_options& options,
              Channel& stores, Channel& loads);
  ~CopyPlanner() { close(); }

  // Why copy methods that would be chosen are not available, or "".
  const std::string& problem() const { return problem_; }

  // Before rebind(), which cannot fail: gives the new groups their tables, and fits the predictions
  // to them.
  MethodChooser prepare(std::vector<Group>& groups) const;
  void rebind(MethodChooser chooser) noexcept { chooser_ = std::move(chooser); }

  // Sets what it takes to copy the job alone: the copy method of its first group, entries of the
  // driver's queue, seconds of the thread that submits it.
  void plan(Job& job) const noexcept;

  // The parts of a transfer of these jobs. is_alone: no other is in flight in the channel.
  std::vector<TransferPart> parts_of(const JobList& jobs, bool is_alone) const;
  size_t entries_of(const std::vector<TransferPart>& parts) const;

  // A transfer took this long on the device. When compute kernels hold up its kernels, it can be
  // slower than the copy engines alone; those then take over for a while.
  void record_duration(const Transfer& transfer, double seconds) noexcept;

  // Frees the memory. Nothing runs any more.
  void close();
  // Never frees the memory: the device is lost, and may still use it.
  void leak() noexcept;

 private:
  void set_up(Channel& stores, Channel& loads);
  void make_tables(std::vector<Group>& groups) const;
  CopyMethod choose(const Job& job, int group, size_t blocks) const;
  size_t unstaged_blocks(const Job& job) const;
  double without_kernels(const MethodChooser::Transfer& transfer) const;  // seconds

  std::vector<Group>& groups_;
  Device& device_;
  const kvswap_copy_method_options options_;
  MethodChooser chooser_;
  std::string problem_;
  double crowded_until_ = 0;  // until then no kernels copy: the GPU is busy with others'
  bool has_kernels_ = false;
  const Stream stream_;  // to upload tables
  uint64_t staging_ = 0;
};

// Splits off what would take the submitting thread longer than `seconds`. Returns the index of the
// first part of that remainder; the number of parts if there is none.
size_t split_remainder(std::vector<TransferPart>& parts, const Group& group, double seconds);

}  // namespace kvswap
