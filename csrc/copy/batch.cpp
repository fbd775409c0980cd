#include "copy/batch.h"

#include <algorithm>
#include <string>

#include "check.h"
#include "copy/address_map.h"
#include "cuda/context.h"

namespace kvswap {
namespace {

[[noreturn]] void fail_at(const char* call, cuda::Result result, const Fragment& fragment) {
  std::string src = hex(fragment.src), dst = hex(fragment.dst);
  try {
    AddressMap addresses;
    src = addresses.describe(fragment.src);
    dst = addresses.describe(fragment.dst);
  } catch (const std::runtime_error&) {
    // On a lost device every question fails; the first error is the one to report.
  }
  fail(call, " failed at index ", fragment.index, ", from ", src, " to ", dst, ", ", fragment.bytes,
       " bytes: ", cuda::describe(result));
}

void copy_one_by_one(const std::vector<Fragment>& fragments, cuda::Stream stream) {
  for (const Fragment& fragment : fragments) {
    const cuda::Result result =
        cuda::driver().copy_async(fragment.dst, fragment.src, fragment.bytes, stream);
    if (result != cuda::kSuccess) fail_at("cuMemcpyAsync", result, fragment);
  }
}

// The other calls refuse memory of two GPUs that was mapped by its owner's device only, as
// expandable segments are.
void copy_between_devices(const std::vector<Fragment>& fragments, const cuda::StreamRef& stream,
                          int src_device) {
  const cuda::Context src = cuda::primary_context(src_device);
  const cuda::Context dst = cuda::primary_context(stream.device);
  for (const Fragment& fragment : fragments) {
    const cuda::Result result = cuda::driver().copy_peer_async(fragment.dst, dst, fragment.src, src,
                                                               fragment.bytes, stream.handle);
    if (result != cuda::kSuccess) fail_at("cuMemcpyPeerAsync", result, fragment);
  }
}

// The arguments of one batch call. Their memory is used again for the next one.
struct BatchArguments {
  std::vector<cuda::Address> dsts, srcs;
  std::vector<size_t> sizes, attribute_starts;
  std::vector<cuda::CopyAttributes> attributes;

  void fill(const Fragment* first, size_t count, bool host_source_any_order) {
    dsts.clear();
    srcs.clear();
    sizes.clear();
    attribute_starts.clear();
    attributes.clear();
    for (size_t i = 0; i < count; ++i) {
      dsts.push_back(first[i].dst);
      srcs.push_back(first[i].src);
      sizes.push_back(first[i].bytes);
      const int order = host_source_any_order && first[i].src_on_host ? cuda::kSourceOrderAny
                                                                      : cuda::kSourceOrderStream;
      // An attribute holds for the copies from its start to the next one's.
      if (attributes.empty() || attributes.back().source_order != order) {
        attributes.emplace_back().source_order = order;
        attribute_starts.push_back(i);
      }
    }
  }
};

void copy_in_batches(const std::vector<Fragment>& fragments, cuda::Stream stream,
                     const BatchOptions& options) {
  BatchArguments arguments;
  for (size_t first = 0, count; first < fragments.size(); first += count) {
    count = std::min(kBatchFragments, fragments.size() - first);
    arguments.fill(&fragments[first], count, options.host_source_any_order);
    size_t failed = 0;
    const cuda::Result result = cuda::driver().copy_batch_async(
        arguments.dsts.data(), arguments.srcs.data(), arguments.sizes.data(), count,
        arguments.attributes.data(), arguments.attribute_starts.data(), arguments.attributes.size(),
        &failed, stream);
    // The index is count or more where the driver blames no single copy.
    if (result != cuda::kSuccess) {
      fail_at("cuMemcpyBatchAsync", result, fragments[first + (failed < count ? failed : 0)]);
    }
  }
}

bool is_legacy(cuda::Stream stream) { return stream == nullptr || stream == cuda::kLegacyStream; }

// The batch call refuses the legacy default stream: a stream of our own takes its place in the
// order.
void copy_beside_legacy_stream(const std::vector<Fragment>& fragments,
                               const cuda::StreamRef& legacy, const BatchOptions& options) {
  const cuda::StreamRef side = cuda::side_stream(legacy.device);
  cuda::order_after(legacy, side);
  cuda::run_before(side, legacy, [&] { copy_in_batches(fragments, side.handle, options); });
}

void submit(const std::vector<Fragment>& fragments, const cuda::StreamRef& stream,
            const BatchOptions& options, bool capturing) {
  const bool one_by_one = capturing || options.has_pageable || fragments.size() < 2 ||
                          cuda::driver().copy_batch_async == nullptr;
  if (options.src_device >= 0) {
    copy_between_devices(fragments, stream, options.src_device);
  } else if (one_by_one) {
    copy_one_by_one(fragments, stream.handle);
  } else if (is_legacy(stream.handle)) {
    copy_beside_legacy_stream(fragments, stream, options);
  } else {
    copy_in_batches(fragments, stream.handle, options);
  }
}

}  // namespace

void copy_batch(const FragmentList& fragments, const cuda::StreamRef& stream,
                const BatchOptions& options) {
  const cuda::ContextGuard context(stream.device);
  const bool capturing = cuda::is_capturing(stream);
  KVSWAP_CHECK(
      !capturing || !options.has_pageable,
      "the current stream is being captured into a CUDA graph, which cannot hold copies of "
      "pageable host memory; pin the memory or copy outside the capture");
  try {
    submit(fragments.items(), stream, options, capturing);
  } catch (...) {
    // The caller may free its memory as soon as the error reaches it.
    if (options.wait) cuda::driver().synchronize_stream(stream.handle);
    throw;
  }
  if (options.wait) {
    KVSWAP_DRIVER_CHECK(cuda::driver().synchronize_stream(stream.handle), "cuStreamSynchronize");
  }
}

}  // namespace kvswap
