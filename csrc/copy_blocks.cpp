#include <algorithm>
#include <optional>

#include "block_tensor.h"
#include "check.h"
#include "copy/address_map.h"
#include "copy/batch.h"
#include "copy/host.h"
#include "copy/overlap.h"
#include "cuda_context.h"
#include "cuda_stream.h"

namespace kvswap {
namespace {

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

// Whether a block of one tensor can share a byte with a block of the other, judged without ids.
bool may_overlap(const BlockTensor& a, const BlockTensor& b) {
  if (a.end() <= b.base || b.end() <= a.base) return false;
  if (a.pitch != b.pitch || a.pitch == 0) return true;
  // Interleaved blocks, such as K and V in one storage: compare their places within the pitch.
  const uint64_t distance =
      b.base >= a.base ? (b.base - a.base) % a.pitch : (a.pitch - (a.base - b.base) % a.pitch);
  return distance < a.bytes || distance + b.bytes > a.pitch;
}

// The tensors among which a block might be written twice or both read and written. The blocks of
// one tensor never overlap each other and were found distinct.
std::vector<Span> spans_in_doubt(const std::vector<BlockTensor>& src,
                                 const std::vector<BlockTensor>& dst, const BlockIds& ids) {
  std::vector<bool> src_doubt(src.size()), dst_doubt(dst.size());
  for (size_t d = 0; d < dst.size(); ++d) {
    for (size_t s = 0; s < src.size(); ++s) {
      if (src[s].device == dst[d].device && may_overlap(src[s], dst[d])) {
        src_doubt[s] = dst_doubt[d] = true;
      }
    }
    for (size_t other = 0; other < d; ++other) {
      if (may_overlap(dst[other], dst[d])) dst_doubt[other] = dst_doubt[d] = true;
    }
  }
  std::vector<Span> spans;
  const auto append = [&](const std::vector<BlockTensor>& tensors, const std::vector<bool>& doubt,
                          const std::vector<int64_t>& blocks, bool written) {
    for (size_t t = 0; t < tensors.size(); ++t) {
      for (size_t i = 0; doubt[t] && i < blocks.size(); ++i) {
        const uint64_t begin = tensors[t].address(blocks[i]);
        spans.push_back({begin, begin + tensors[t].bytes, written, static_cast<int64_t>(i),
                         static_cast<int64_t>(t)});
      }
    }
  };
  append(src, src_doubt, ids.src.ids, false);
  append(dst, dst_doubt, ids.dst.ids, true);
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
       ", share memory; the copies of one call run in any order");
}

FragmentList make_fragments(const std::vector<BlockTensor>& src,
                            const std::vector<BlockTensor>& dst, const BlockIds& ids) {
  const size_t count = ids.src.ids.size();
  FragmentList fragments(count * src.size());
  for (size_t t = 0; t < src.size(); ++t) {
    if (src[t].bytes == 0) continue;
    for (size_t i = 0; i < count; ++i) {
      fragments.add({src[t].address(ids.src.ids[i]), dst[t].address(ids.dst.ids[i]), src[t].bytes,
                     static_cast<int64_t>(i), src[t].device < 0},
                    i > 0);
    }
  }
  return fragments;
}

bool is_pageable(const BlockTensor& tensor, AddressMap& addresses) {
  return tensor.device < 0 && addresses.find(tensor.base).kind == MemoryKind::kPageable;
}

void copy_on_device(const FragmentList& fragments, int src_device, int dst_device,
                    bool has_pageable) {
  BatchOptions options;
  options.device = dst_device >= 0 ? dst_device : src_device;
  options.has_pageable = has_pageable;
  const cuda::Stream stream = cuda::current_stream(options.device);
  const bool between_devices = src_device >= 0 && dst_device >= 0 && src_device != dst_device;
  cuda::Stream src_stream = nullptr;
  if (between_devices) {
    options.src_device = src_device;
    src_stream = cuda::current_stream(src_device);
    const cuda::ContextGuard context(src_device);
    cuda::order_after(src_stream, stream);
  }
  const cuda::ContextGuard context(options.device);
  const bool has_host = src_device < 0 || dst_device < 0;
  KVSWAP_CHECK(!has_host || !cuda::is_capturing(stream),
               "the current stream is being captured into a CUDA graph, and this op returns only "
               "when host memory was read or written; capture swap_blocks_batch with pinned memory "
               "instead");
  copy_batch(fragments, stream, options);
  if (between_devices) cuda::order_after(stream, src_stream);
  if (has_host) {
    KVSWAP_DRIVER_CHECK(cuda::driver()->synchronize_stream(stream), "cuStreamSynchronize");
  }
}

}  // namespace

void copy_blocks(const std::vector<BlockTensor>& src, const std::vector<BlockTensor>& dst,
                 const BlockIds& ids) {
  for (size_t t = 0; t < src.size(); ++t) {
    check_same_block(src[t], dst[t]);
    KVSWAP_CHECK(src[t].device == src[0].device, src[t].name, " is on another device than ",
                 src[0].name, "; expected all on one device");
    KVSWAP_CHECK(dst[t].device == dst[0].device, dst[t].name, " is on another device than ",
                 dst[0].name, "; expected all on one device");
    check_range(ids.src, src[t]);
    check_range(ids.dst, dst[t]);
  }
  if (src.empty() || ids.src.ids.empty()) return;
  check_distinct(ids.dst, dst[0].count);
  check_disjoint(src, dst, ids);
  const FragmentList fragments = make_fragments(src, dst, ids);
  if (fragments.empty()) return;
  if (src[0].device < 0 && dst[0].device < 0) return copy_on_host(fragments);
  AddressMap addresses;
  bool has_pageable = false;
  for (size_t t = 0; t < src.size(); ++t) {
    has_pageable |= is_pageable(src[t], addresses) || is_pageable(dst[t], addresses);
  }
  copy_on_device(fragments, src[0].device, dst[0].device, has_pageable);
}

}  // namespace kvswap
