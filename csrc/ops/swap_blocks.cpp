#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "copy/address_map.h"
#include "copy/batch.h"
#include "copy/host_copy.h"
#include "copy/overlap.h"
#include "cuda/context.h"
#include "cuda/stream.h"
#include "ops/block_tensor.h"
#include "ops/ops.h"
#include "ops/tensor_check.h"

namespace kvswap {
namespace {

// A list of block ids, and how a user names its entries.
struct IdList {
  const char* before;  // "block_mapping["
  const char* after;   // ", 1]"
  std::vector<int64_t> ids;

  std::string name(size_t i) const { return before + std::to_string(i) + after; }
};

// Block `src.ids[i]` becomes block `dst.ids[i]`.
struct BlockIds {
  IdList src;
  IdList dst;
};

bool is_pageable(const BlockTensor& tensor, AddressMap& addresses) {
  return tensor.device.is_cpu() && addresses.find(tensor.base).kind == MemoryKind::kPageable;
}

// Tells whether one copy of the driver may contain two blocks. It may not if they are in pinned
// memory that was registered in separate pieces. Without a driver nothing is registered.
class Pieces {
 public:
  Pieces(const BlockTensor& tensor, AddressMap* addresses)
      : tensor_(tensor), addresses_(addresses) {
    has_pieces_ =
        addresses != nullptr && tensor.device.is_cpu() && addresses->find(tensor.base).end != 0;
  }
  bool has_both(int64_t block, int64_t other) const {
    return !has_pieces_ || begin(block) == begin(other);
  }

 private:
  uint64_t begin(int64_t block) const { return addresses_->find(tensor_.address(block)).begin; }

  const BlockTensor& tensor_;
  AddressMap* addresses_;
  bool has_pieces_;
};

void check_same_device(const BlockTensor& tensor, const BlockTensor& first) {
  KVSWAP_CHECK(tensor.device == first.device, tensor.name, " is on ", device_text(tensor.device),
               ", but ", first.name, " is on ", device_text(first.device),
               "; expected all on one device");
}

void check_range(const IdList& list, const BlockTensor& tensor) {
  for (size_t i = 0; i < list.ids.size(); ++i) {
    KVSWAP_CHECK(list.ids[i] >= 0 && list.ids[i] < tensor.count, list.name(i), " is ", list.ids[i],
                 ", but ", tensor.name, " has ", tensor.count, " blocks; expected 0 to ",
                 tensor.count - 1);
  }
}

void check_distinct(const IdList& list, int64_t count) {
  std::vector<bool> seen(static_cast<size_t>(count));
  for (size_t i = 0; i < list.ids.size(); ++i) {
    if (seen[list.ids[i]]) {
      const auto first = std::find(list.ids.begin(), list.ids.end(), list.ids[i]);
      fail(list.name(i), " is ", list.ids[i], ", as is ", list.name(first - list.ids.begin()),
           "; a call can write a block only once");
    }
    seen[list.ids[i]] = true;
  }
}

// Whether a block of `a` can share a byte with a block of `b`, judged without ids; `a` begins
// first.
bool may_overlap(const BlockTensor& a, const BlockTensor& b) {
  if (a.pitch != b.pitch || a.pitch == 0) return true;
  // Interleaved blocks, such as K and V in one storage: compare their places within the pitch.
  const uint64_t distance = (b.base - a.base) % a.pitch;
  return distance < a.bytes || distance + b.bytes > a.pitch;
}

struct Side {
  const BlockTensor* tensor;
  const IdList* list;
  bool written;
  int64_t index;       // in the caller's list of tensors
  bool doubt = false;  // a block of it might share memory with one of another tensor
};

// The tensors among which a block might be written twice or both read and written. The blocks of
// one tensor never overlap each other and were found distinct.
std::vector<Span> spans_in_doubt(const std::vector<BlockTensor>& src,
                                 const std::vector<BlockTensor>& dst, const BlockIds& ids) {
  std::vector<Side> sides;
  for (size_t t = 0; t < src.size(); ++t) {
    const auto index = static_cast<int64_t>(t);
    if (src[t].device == dst[t].device) sides.push_back({&src[t], &ids.src, false, index});
    sides.push_back({&dst[t], &ids.dst, true, index});
  }
  std::sort(sides.begin(), sides.end(),
            [](const Side& a, const Side& b) { return a.tensor->base < b.tensor->base; });
  for (size_t i = 0; i < sides.size(); ++i) {
    const uint64_t end = sides[i].tensor->end();
    for (size_t j = i + 1; j < sides.size() && sides[j].tensor->base < end; ++j) {
      const bool some_write = sides[i].written || sides[j].written;
      if (some_write && may_overlap(*sides[i].tensor, *sides[j].tensor)) {
        sides[i].doubt = sides[j].doubt = true;
      }
    }
  }
  std::vector<Span> spans;
  for (const Side& side : sides) {
    for (size_t i = 0; side.doubt && i < side.list->ids.size(); ++i) {
      const uint64_t begin = side.tensor->address(side.list->ids[i]);
      spans.push_back(
          {begin, begin + side.tensor->bytes, side.written, static_cast<int64_t>(i), side.index});
    }
  }
  return spans;
}

void check_disjoint(const std::vector<BlockTensor>& src, const std::vector<BlockTensor>& dst,
                    const BlockIds& ids) {
  std::vector<Span> spans = spans_in_doubt(src, dst, ids);
  const auto overlap = find_overlap(spans);
  if (!overlap) return;
  const auto words = [&](const Span& span) {
    const BlockTensor& tensor = (span.written ? dst : src)[span.tensor];
    const IdList& list = span.written ? ids.dst : ids.src;
    return "block " + std::to_string(list.ids[span.index]) + " of " + tensor.name + ", " +
           (span.written ? "written" : "read") + " at " + list.name(span.index);
  };
  fail(words(overlap->first), ", and ", words(overlap->second),
       ", share memory; the copies of one call run in any order: use two calls");
}

FragmentList make_fragments(const std::vector<BlockTensor>& src,
                            const std::vector<BlockTensor>& dst, const BlockIds& ids,
                            AddressMap* addresses) {
  const size_t count = ids.src.ids.size();
  FragmentList fragments(count * src.size());
  for (size_t t = 0; t < src.size(); ++t) {
    if (src[t].bytes == 0) continue;
    const Pieces src_pieces(src[t], addresses), dst_pieces(dst[t], addresses);
    for (size_t i = 0; i < count; ++i) {
      fragments.add({src[t].address(ids.src.ids[i]), dst[t].address(ids.dst.ids[i]), src[t].bytes,
                     static_cast<int64_t>(i), src[t].device.is_cpu()},
                    i > 0 && src_pieces.has_both(ids.src.ids[i - 1], ids.src.ids[i]) &&
                        dst_pieces.has_both(ids.dst.ids[i - 1], ids.dst.ids[i]));
    }
  }
  return fragments;
}

// Both streams wait for each other around `copy`, as in Tensor.copy_.
template <typename Copy>
void copy_ordered_after(const cuda::StreamRef& src_stream, const cuda::StreamRef& stream,
                        const Copy& copy) {
  cuda::order_after(src_stream, stream);
  // Also by an error: what was submitted before it still reads the source.
  cuda::run_before(stream, src_stream, copy);
}

void copy_on_device(const FragmentList& fragments, const TensorDevice& src_device,
                    const TensorDevice& dst_device, bool has_pageable) {
  BatchOptions options;
  options.has_pageable = has_pageable;
  options.wait = src_device.is_cpu() || dst_device.is_cpu();
  const cuda::StreamRef stream =
      cuda::current_stream((dst_device.is_cpu() ? src_device : dst_device).index);
  const cuda::ContextGuard context(stream.device);  // so that each call below need not change it
  KVSWAP_CHECK(!options.wait || !cuda::is_capturing(stream),
               "the current stream is being captured into a CUDA graph, and this op returns only "
               "when host memory was read or written; capture swap_blocks_batch with pinned memory "
               "instead");
  if (options.wait || src_device == dst_device) return copy_batch(fragments, stream, options);
  options.src_device = src_device.index;
  copy_ordered_after(cuda::current_stream(src_device.index), stream,
                     [&] { copy_batch(fragments, stream, options); });
}

// What a call of an op copies: blocks between each pair of tensors.
struct Copies {
  std::vector<BlockTensor> src;
  std::vector<BlockTensor> dst;
  BlockIds ids;
};

void check_each_tensor(const Copies& copies) {
  const auto& [src, dst, ids] = copies;
  for (size_t t = 0; t < src.size(); ++t) {
    check_same_block(src[t], dst[t]);
    check_same_device(src[t], src[0]);
    check_same_device(dst[t], dst[0]);
    check_range(ids.src, src[t]);
    check_range(ids.dst, dst[t]);
  }
}

// Gives tensors without addresses such that two of them overlap only where they share a storage.
void make_addresses(std::vector<BlockTensor>& src, std::vector<BlockTensor>& dst) {
  std::map<uint64_t, uint64_t> numbers;  // of the storages
  uint64_t last = 0;
  for (std::vector<BlockTensor>* side : {&src, &dst}) {
    for (BlockTensor& tensor : *side) {
      if (tensor.device.has_addresses()) continue;
      const uint64_t storage = tensor.base - tensor.offset;
      // Null tells nothing: each tensor gets a number of its own.
      if (storage == 0 || numbers.count(storage) == 0) numbers[storage] = ++last;
      tensor.base = (numbers[storage] << 48) + tensor.offset;
    }
  }
}

// Checks everything: ids in range, no block written twice, no block read and written. Returns
// whether there is anything to copy.
bool check_copies(Copies& copies) {
  check_each_tensor(copies);
  const bool has_bytes = std::any_of(copies.src.begin(), copies.src.end(),
                                     [](const BlockTensor& tensor) { return tensor.bytes > 0; });
  if (copies.ids.src.ids.empty() || !has_bytes) return false;
  make_addresses(copies.src, copies.dst);
  check_distinct(copies.ids.dst, copies.dst[0].count);
  check_disjoint(copies.src, copies.dst, copies.ids);
  return true;
}

// Runs on the current stream of the destination's GPU, or of the source's if the destination is
// host memory. Between two GPUs, the current streams of both wait for each other around the copy.
// If a side is host memory, the copy has ended on return: compilers pass clones of host tensors,
// which they free or copy back at once.
void copy_blocks(Copies copies) {
  if (!check_copies(copies)) return;
  const auto& [src, dst, ids] = copies;
  if (src[0].device.is_cpu() && dst[0].device.is_cpu()) {
    return copy_on_host(make_fragments(src, dst, ids, nullptr));
  }
  AddressMap addresses;
  bool has_pageable = false;
  for (size_t t = 0; t < src.size(); ++t) {
    has_pageable |= is_pageable(src[t], addresses) || is_pageable(dst[t], addresses);
  }
  copy_on_device(make_fragments(src, dst, ids, &addresses), src[0].device, dst[0].device,
                 has_pageable);
}

std::vector<int64_t> read_strided(const int64_t* data, int64_t count, int64_t stride) {
  std::vector<int64_t> ids(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) ids[static_cast<size_t>(i)] = data[i * stride];
  return ids;
}

std::vector<int64_t> read_column(const Tensor& block_mapping, int64_t column) {
  const auto* data = static_cast<const int64_t*>(block_mapping.const_data_ptr());
  return read_strided(data + column * block_mapping.stride(1), block_mapping.size(0),
                      block_mapping.stride(0));
}

std::vector<int64_t> read_ids(const char* name, const Tensor& ids) {
  check_on_cpu(name, ids);
  check_int64_list(name, ids);
  return read_strided(static_cast<const int64_t*>(ids.const_data_ptr()), ids.size(0),
                      ids.stride(0));
}

std::vector<BlockTensor> block_tensors(const char* list, const std::vector<Tensor>& tensors) {
  std::vector<BlockTensor> blocks;
  blocks.reserve(tensors.size());
  for (size_t t = 0; t < tensors.size(); ++t) {
    blocks.emplace_back(std::string(list) + "[" + std::to_string(t) + "]", tensors[t]);
  }
  return blocks;
}

Copies copies_of(const Tensor& src, const Tensor& dst, int64_t block_size_in_bytes,
                 const Tensor& block_mapping) {
  check_on_cpu("block_mapping", block_mapping);
  check_int64("block_mapping", block_mapping);
  KVSWAP_CHECK(block_mapping.dim() == 2 && block_mapping.size(1) == 2, "block_mapping has shape ",
               shape_text(block_mapping), "; expected [n, 2]: pairs of source and destination");
  const BlockTensor src_blocks("src", src), dst_blocks("dst", dst);
  for (const BlockTensor* side : {&src_blocks, &dst_blocks}) {
    KVSWAP_CHECK(side->count == 0 || block_size_in_bytes == static_cast<int64_t>(side->bytes),
                 "block_size_in_bytes is ", block_size_in_bytes, ", but a block of ", side->name,
                 " has ", side->bytes, " bytes; expected the same");
  }
  return {{src_blocks},
          {dst_blocks},
          {{"block_mapping[", ", 0]", read_column(block_mapping, 0)},
           {"block_mapping[", ", 1]", read_column(block_mapping, 1)}}};
}

Copies copies_of(const std::vector<Tensor>& src, const std::vector<Tensor>& dst,
                 const Tensor& src_block_ids, const Tensor& dst_block_ids) {
  KVSWAP_CHECK(src.size() == dst.size(), "src has ", src.size(), " tensors and dst has ",
               dst.size(), "; expected a pair for each layer");
  BlockIds ids = {{"src_block_ids[", "]", read_ids("src_block_ids", src_block_ids)},
                  {"dst_block_ids[", "]", read_ids("dst_block_ids", dst_block_ids)}};
  KVSWAP_CHECK(ids.src.ids.size() == ids.dst.ids.size(), "src_block_ids has ", ids.src.ids.size(),
               " ids and dst_block_ids has ", ids.dst.ids.size(), "; expected the same number");
  return {block_tensors("src", src), block_tensors("dst", dst), std::move(ids)};
}

}  // namespace

void swap_blocks(const Tensor& src, const Tensor& dst, int64_t block_size_in_bytes,
                 const Tensor& block_mapping) {
  with_op_name("swap_blocks",
               [&] { copy_blocks(copies_of(src, dst, block_size_in_bytes, block_mapping)); });
}

void swap_kv_blocks(const std::vector<Tensor>& src, const std::vector<Tensor>& dst,
                    const Tensor& src_block_ids, const Tensor& dst_block_ids) {
  with_op_name("swap_kv_blocks",
               [&] { copy_blocks(copies_of(src, dst, src_block_ids, dst_block_ids)); });
}

void check_swap_blocks(const Tensor& src, const Tensor& dst, int64_t block_size_in_bytes,
                       const Tensor& block_mapping) {
  with_op_name("swap_blocks", [&] {
    Copies copies = copies_of(src, dst, block_size_in_bytes, block_mapping);
    check_copies(copies);
  });
}

void check_swap_kv_blocks(const std::vector<Tensor>& src, const std::vector<Tensor>& dst,
                          const Tensor& src_block_ids, const Tensor& dst_block_ids) {
  with_op_name("swap_kv_blocks", [&] {
    Copies copies = copies_of(src, dst, src_block_ids, dst_block_ids);
    check_copies(copies);
  });
}

}  // namespace kvswap
