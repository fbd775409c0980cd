#include "check.h"
#include "copy/address_check.h"
#include "copy/address_map.h"
#include "copy/batch.h"
#include "copy/host_copy.h"
#include "cuda/stream.h"
#include "environment.h"
#include "ops/ops.h"
#include "ops/tensor_check.h"

namespace kvswap {
namespace {

// The fragments of one call, and what their addresses say about how to copy them.
class Batch {
 public:
  explicit Batch(size_t count) : fragments_(count), check_(address_check_is_on()) {}

  void add(int64_t index, int64_t src_ptr, int64_t dst_ptr, int64_t size) {
    KVSWAP_CHECK(size >= 0, "sizes[", index, "] is ", size, "; expected 0 or more bytes");
    if (size == 0) return;
    const auto src_address = static_cast<uint64_t>(src_ptr);
    const auto dst_address = static_cast<uint64_t>(dst_ptr);
    KVSWAP_CHECK(src_address != 0, "src_ptrs[", index, "] is null, with a size of ", size,
                 "; expected an address");
    KVSWAP_CHECK(dst_address != 0, "dst_ptrs[", index, "] is null, with a size of ", size,
                 "; expected an address");
    const Memory src = addresses_.find(src_address);
    const Memory dst = addresses_.find(dst_address);
    see_device("src_ptrs", index, src_address, src);
    see_device("dst_ptrs", index, dst_address, dst);
    has_pageable_ |= src.kind == MemoryKind::kPageable || dst.kind == MemoryKind::kPageable;
    // Where the addresses are checked, each fragment keeps its own index for the errors.
    const bool merge = !check_ && src.begin == last_src_ && dst.begin == last_dst_;
    last_src_ = src.begin;
    last_dst_ = dst.begin;
    fragments_.add({src_address, dst_address, static_cast<uint64_t>(size), index, !src.on_device()},
                   merge);
  }

  void copy(bool host_source_any_order) {
    if (fragments_.empty()) return;
    if (check_) check_addresses(fragments_, addresses_);
    if (device_ < 0) return copy_on_host(fragments_);
    BatchOptions options;
    options.has_pageable = has_pageable_;
    options.wait = has_pageable_;
    options.host_source_any_order = host_source_any_order;
    copy_batch(fragments_, cuda::current_stream(device_), options);
  }

 private:
  void see_device(const char* name, int64_t index, uint64_t address, const Memory& memory) {
    if (!memory.on_device()) return;
    if (device_ < 0) device_ = memory.device;
    KVSWAP_CHECK(memory.device == device_, name, "[", index, "] is ", addresses_.describe(address),
                 ", but the first device address lies on device ", device_,
                 "; one call copies for one device");
  }

  FragmentList fragments_;
  AddressMap addresses_;
  const bool check_;
  int device_ = -1;
  bool has_pageable_ = false;
  uint64_t last_src_ = 0;
  uint64_t last_dst_ = 0;
};

void check_list(const char* name, const Tensor& tensor, int64_t count) {
  check_on_cpu(name, tensor);
  check_int64_list(name, tensor);
  KVSWAP_CHECK(tensor.is_contiguous(), name, " has stride ", tensor.stride(0),
               "; expected a contiguous tensor, call .contiguous()");
  KVSWAP_CHECK(tensor.size(0) == count, name, " has length ", tensor.size(0), ", but src_ptrs has ",
               count, "; expected the same number");
}

}  // namespace

void swap_blocks_batch(const Tensor& src_ptrs, const Tensor& dst_ptrs, const Tensor& sizes,
                       bool is_src_access_order_any) {
  with_op_name("swap_blocks_batch", [&] {
    const int64_t count = src_ptrs.numel();
    check_list("src_ptrs", src_ptrs, count);
    check_list("dst_ptrs", dst_ptrs, count);
    check_list("sizes", sizes, count);
    const auto* src = static_cast<const int64_t*>(src_ptrs.const_data_ptr());
    const auto* dst = static_cast<const int64_t*>(dst_ptrs.const_data_ptr());
    const auto* bytes = static_cast<const int64_t*>(sizes.const_data_ptr());
    Batch batch(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) batch.add(i, src[i], dst[i], bytes[i]);
    batch.copy(is_src_access_order_any);
  });
}

}  // namespace kvswap
