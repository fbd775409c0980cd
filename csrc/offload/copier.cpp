#include "offload/copier.h"

#include <algorithm>
#include <numeric>

#include "copy/address_check.h"
#include "copy/address_map.h"
#include "copy/host.h"
#include "cuda/context.h"
#include "cuda/kernels.h"

namespace kvswap {
namespace {

// Neighbours on the host are copied as one, whatever order the caller named them in.
void sort_by_slot(TransferPart& part) {
  if (std::is_sorted(part.slots.begin(), part.slots.end())) return;
  std::vector<size_t> order(part.slots.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](size_t one, size_t other) { return part.slots[one] < part.slots[other]; });
  const TransferPart old = part;
  for (size_t i = 0; i < order.size(); ++i) {
    part.blocks[i] = old.blocks[order[i]];
    part.slots[i] = old.slots[order[i]];
  }
}

}  // namespace

Copier::Copier(int channel, int device, cuda::Stream copies)
    : channel_(channel), device_(device), copies_(copies) {}

void Copier::use_staging(cuda::Address begin, uint64_t bytes) {
  kernels_ = cuda::create_stream();
  staging_ = std::make_unique<StagingBuffer>(begin, bytes);
}

cuda::Stream Copier::copy(Transfer& transfer, PartRange parts, int layer_group,
                          const std::vector<Group>& groups, int64_t layers) {
  if (environment_.check_addresses && parts.begin == 0)
    check(transfer, layer_group, groups, layers);
  FragmentList fragments(0);
  bool is_unpacking = false;
  for (size_t i = parts.begin; i < parts.end; ++i) {
    TransferPart& part = transfer.parts[i];
    const Group& group = groups[part.group];
    const SlabRange slabs = group.slabs_of(layer_group, transfer.layer_groups(), layers);
    if (slabs.begin == slabs.end) continue;
    is_unpacking = part.method == CopyMethod::kStaged && channel_ != kStores;
    if (part.method == CopyMethod::kStaged) {
      send(fragments, groups);
      sort_by_slot(part);
      stage(part, transfer, groups, slabs);
      continue;
    }
    // The unstaged tail of a load is copied while the load itself is unpacked; no other load is
    // unpacked then.
    if (!part.is_unstaged) order_after_unpacking();
    if (part.method == CopyMethod::kStrided) {
      copy_strided(paged(part, group), group.runs_of(slabs), copies_);
    } else if (part.method == CopyMethod::kKernel) {
      copy_by_kernel(packed(part, group, slabs), cuda::kernels(device_), copies_);
    } else {
      add_fragments(fragments, paged(part, group), slabs);
    }
  }
  send(fragments, groups);
  if (is_unpacking) return kernels_;
  order_after_unpacking();
  return copies_;
}

void Copier::stage(const TransferPart& part, const Transfer& transfer,
                   const std::vector<Group>& groups, SlabRange slabs) {
  if (channel_ == kStores) {
    KVSWAP_DRIVER_CHECK(cuda::driver().wait_event(kernels_, transfer.start, 0),
                        "cuStreamWaitEvent");
  }
  staging_->copy(packed(part, groups[part.group], slabs), {device_, copies_, kernels_},
                 cuda::kernels(device_), batch_options(groups));
}

void Copier::send(FragmentList& fragments, const std::vector<Group>& groups) {
  if (fragments.empty()) return;
  if (device_ < 0) {
    copy_on_host(fragments);
  } else {
    copy_batch(fragments, {device_, copies_}, batch_options(groups));
  }
  fragments = FragmentList(0);
}

// What was staged is on the GPU only when it has been unpacked.
void Copier::order_after_unpacking() {
  if (has_staging() && channel_ != kStores) staging_->order_before(copies_);
}

BlockCopy Copier::paged(const TransferPart& part, const Group& group) const {
  const int64_t *blocks = part.blocks.data(), *slots = part.slots.data();
  const size_t count = part.blocks.size();
  if (channel_ == kStores) return {&group.gpu, &group.host, blocks, slots, count, device_ < 0};
  return {&group.host, &group.gpu, slots, blocks, count, true};
}

PackedCopy Copier::packed(const TransferPart& part, const Group& group, SlabRange slabs) const {
  return {&group.gpu,         &group.host,       group.table.get(),  slabs,
          part.blocks.data(), part.slots.data(), part.blocks.size(), channel_ == kStores,
          part.before,        part.after};
}

void Copier::check(const Transfer& transfer, int layer_group, const std::vector<Group>& groups,
                   int64_t layers) const {
  FragmentList all(0);
  for (const TransferPart& part : transfer.parts) {
    const Group& group = groups[part.group];
    add_fragments(all, paged(part, group),
                  group.slabs_of(layer_group, transfer.layer_groups(), layers));
  }
  AddressMap addresses;
  check_addresses(all, addresses);
}

BatchOptions Copier::batch_options(const std::vector<Group>& groups) const {
  BatchOptions options(environment_);
  options.has_pageable = any_is_pageable(groups);
  return options;
}

bool Copier::synchronize() {
  if (device_ < 0) return true;
  bool alive = true;
  for (const cuda::Stream stream : {copies_, kernels_}) {
    if (stream != nullptr) alive &= cuda::driver().synchronize_stream(stream) == cuda::kSuccess;
  }
  if (staging_ != nullptr) staging_->forget();
  return alive;
}

void Copier::close() {
  staging_.reset();
  if (kernels_ != nullptr) cuda::driver().destroy_stream(kernels_);
  kernels_ = nullptr;
}

}  // namespace kvswap
