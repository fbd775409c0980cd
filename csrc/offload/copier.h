#pragma once

#include <memory>
#include <vector>

#include "copy/staged.h"
#include "environment.h"
#include "offload/group.h"
#include "offload/transfer.h"

namespace kvswap {

// Parts of a transfer, by index.
struct PartRange {
  size_t begin, end;
};

// Gives the copies of one channel's transfers to the driver, each part by its copy method. Runs
// without the lock, called by the thread that owns the channel. The context of the device is
// current.
class Copier {
 public:
  // channel: its number. device: -1 where both sides are host memory. copies: the channel's stream.
  Copier(int channel, int device, cuda::Stream copies);
  ~Copier() { close(); }

  // From now on transfers can be staged, in this memory.
  void use_staging(cuda::Address begin, uint64_t bytes);
  bool has_staging() const { return staging_ != nullptr; }

  // Copies one group of layers of some parts, after the transfer's start event and the parts before
  // them. Returns the stream on which the copies end. May sort the blocks of a part.
  cuda::Stream copy(Transfer& transfer, PartRange parts, int layer_group,
                    const std::vector<Group>& groups, int64_t layers);

  // Waits until all that was copied has run. False when the device is lost.
  bool synchronize();

  size_t streams() const { return kernels_ == nullptr ? 0 : 1; }
  size_t events() const { return has_staging() ? staging_->events() : 0; }
  void close();

 private:
  PackedCopy packed(const TransferPart& part, const Group& group, SlabRange slabs) const;
  BlockCopy paged(const TransferPart& part, const Group& group) const;
  void check(const Transfer& transfer, int layer_group, const std::vector<Group>& groups,
             int64_t layers) const;
  void stage(const TransferPart& part, const Transfer& transfer, const std::vector<Group>& groups,
             SlabRange slabs);
  void send(FragmentList& fragments, const std::vector<Group>& groups);
  void order_after_unpacking();
  BatchOptions batch_options(const std::vector<Group>& groups) const;

  const int channel_, device_;
  const cuda::Stream copies_;
  const Environment environment_;
  cuda::Stream kernels_ = nullptr;  // packs and unpacks
  std::unique_ptr<StagingBuffer> staging_;
};

}  // namespace kvswap
