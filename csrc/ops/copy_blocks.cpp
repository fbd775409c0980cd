#include "ops/copy_blocks.h"

#include <algorithm>
#include <optional>

#include "check.h"
#include "copy/address_map.h"
#include "copy/batch.h"
#include "copy/host.h"
#include "copy/overlap.h"
#include "cuda/context.h"
#include "cuda/stream.h"
#include "ops/pieces.h"
#include "ops/tensor_check.h"

namespace kvswap {
namespace {

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
           "; a block can be written once in a call");
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
                     static_cast<int64_t>(i), src[t].device < 0},
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

void copy_on_device(const FragmentList& fragments, int src_device, int dst_device,
                    bool has_pageable) {
  BatchOptions options;
  options.has_pageable = has_pageable;
  options.wait = src_device < 0 || dst_device < 0;
  const cuda::StreamRef stream = cuda::current_stream(dst_device >= 0 ? dst_device : src_device);
  const cuda::ContextGuard context(stream.device);  // so that each call below need not change it
  KVSWAP_CHECK(!options.wait || !cuda::is_capturing(stream),
               "the current stream is being captured into a CUDA graph, and this op returns only "
               "when host memory was read or written; capture swap_blocks_batch with pinned memory "
               "instead");
  if (options.wait || src_device == dst_device) return copy_batch(fragments, stream, options);
  options.src_device = src_device;
  copy_ordered_after(cuda::current_stream(src_device), stream,
                     [&] { copy_batch(fragments, stream, options); });
}

}  // namespace

void copy_blocks(const std::vector<BlockTensor>& src, const std::vector<BlockTensor>& dst,
                 const BlockIds& ids) {
  for (size_t t = 0; t < src.size(); ++t) {
    check_same_block(src[t], dst[t]);
    check_same_device(src[t], src[0]);
    check_same_device(dst[t], dst[0]);
    check_range(ids.src, src[t]);
    check_range(ids.dst, dst[t]);
  }
  std::optional<AddressMap> addresses;
  if (!src.empty() && (src[0].device >= 0 || dst[0].device >= 0)) addresses.emplace();
  AddressMap* known = addresses ? &*addresses : nullptr;
  const FragmentList fragments = make_fragments(src, dst, ids, known);
  if (fragments.empty()) return;
  check_distinct(ids.dst, dst[0].count);
  check_disjoint(src, dst, ids);
  if (known == nullptr) return copy_on_host(fragments);
  bool has_pageable = false;
  for (size_t t = 0; t < src.size(); ++t) {
    has_pageable |= is_pageable(src[t], *known) || is_pageable(dst[t], *known);
  }
  copy_on_device(fragments, src[0].device, dst[0].device, has_pageable);
}

}  // namespace kvswap
