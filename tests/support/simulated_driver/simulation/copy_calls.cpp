#include <algorithm>
#include <utility>

#include "call.h"
#include "calls.h"
#include "strided_copy.h"

namespace simulated {
namespace {

bool can_copy(unsigned long long dst, unsigned long long src, size_t bytes) {
  return device().memory.holds(dst, bytes) && device().memory.holds(src, bytes);
}

int copy_async(unsigned long long dst, unsigned long long src, size_t bytes, void* handle) {
  Call call("cuMemcpyAsync");
  if (call.result) return call.result;
  const auto stream = call.stream(handle);
  if (stream == nullptr) return call.result;
  if (device().faults.copy_fails() || !can_copy(dst, src, bytes)) return kInvalidValue;
  device().log.add("copy ", bytes, " bytes on stream ", device().name(handle));
  Operation operation;
  operation.copies.push_back({dst, src, bytes, {}});
  operation.name = "copy " + std::to_string(bytes) + " bytes";
  device().submit(*stream, std::move(operation));
  return kSuccess;
}

int copy_peer_async(unsigned long long dst, void* dst_context, unsigned long long src,
                    void* src_context, size_t bytes, void* handle) {
  Call call("cuMemcpyPeerAsync");
  if (call.result) return call.result;
  const auto stream = call.stream(handle);
  if (stream == nullptr) return call.result;
  const int to = device_of(dst_context), from = device_of(src_context);
  for (const int ordinal : {to, from}) {
    if (const int lost = device().faults.lost(ordinal)) return lost;
  }
  if (device().faults.copy_fails()) return kInvalidValue;
  Operation operation;
  operation.copies.push_back({dst, src, bytes, {}});
  operation.name = "copy " + std::to_string(bytes) + " bytes between GPUs";
  for (const auto& [address, ordinal] : {std::pair(dst, to), {src, from}}) {
    const Range range = device().memory.find(address);
    if (range.type == 2 && range.device == ordinal && address + bytes <= range.end) continue;
    device().log.violation(operation.name, " is not within memory of GPU ", ordinal);
  }
  device().log.add(operation.name, " on stream ", device().name(handle));
  device().submit(*stream, std::move(operation));
  return kSuccess;
}

int copy_strided_async(const StridedCopy* of, void* handle) {
  Call call("cuMemcpy3DAsync");
  if (call.result) return call.result;
  const auto stream = call.stream(handle);
  if (stream == nullptr) return call.result;
  for (const StridedSide* side : {&of->src, &of->dst}) {
    if (side->pitch < of->width || side->pitch > 0x7fffffff) return kInvalidValue;
  }
  if (device().faults.copy_fails()) return kInvalidValue;
  for (const StridedSide* side : {&of->src, &of->dst}) {
    const uint64_t end = side->address(of->height - 1, of->depth - 1) + of->width;
    if (!device().memory.is_mapped(side->address(0, 0), end)) return kInvalidValue;
  }
  Operation operation;
  for (size_t slice = 0; slice < of->depth; ++slice) {
    for (size_t row = 0; row < of->height; ++row) {
      const auto dst = of->dst.address(row, slice), src = of->src.address(row, slice);
      if (!can_copy(dst, src, of->width)) return kInvalidValue;
      operation.copies.push_back({dst, src, of->width, {}});
    }
  }
  operation.name = "strided copy of " + std::to_string(operation.copies.size()) + " x " +
                   std::to_string(of->width) + " bytes";
  device().log.add(operation.name, " on stream ", device().name(handle));
  device().submit(*stream, std::move(operation));
  return kSuccess;
}

struct Attributes {
  int order, hints[4];
  unsigned flags;
};

int copy_batch_async(unsigned long long* dsts, unsigned long long* srcs, size_t* sizes,
                     size_t count, Attributes* attributes, size_t* starts, size_t attribute_count,
                     size_t* failed, void* handle) {
  Call call("cuMemcpyBatchAsync");
  if (call.result) return call.result;
  if (reinterpret_cast<uintptr_t>(handle) <= 1) return kInvalidValue;
  const auto stream = call.stream(handle);
  if (stream == nullptr) return call.result;
  std::ostringstream orders;
  for (size_t i = 0; i < attribute_count; ++i) {
    orders << " " << attributes[i].order << " from " << starts[i];
  }
  device().log.add("batch of ", count, " on stream ", device().name(handle), ", source order",
                   orders.str());
  Operation operation;
  size_t part = 0;
  bool fails = false;
  for (size_t i = 0; i < count; ++i) {
    while (part + 1 < attribute_count && starts[part + 1] <= i) ++part;
    fails = device().faults.copy_fails() || !can_copy(dsts[i], srcs[i], sizes[i]);
    if (fails) {
      *failed = i;
      break;
    }
    Copy copy{dsts[i], srcs[i], sizes[i], {}};
    // In any order (3) the source may be read before the stream gets there.
    const auto* source = reinterpret_cast<const char*>(srcs[i]);
    if (attributes[part].order != 1) copy.early.assign(source, source + sizes[i]);
    operation.copies.push_back(std::move(copy));
  }
  operation.name = "batch of " + std::to_string(operation.copies.size());
  device().check_addresses(operation);
  device().submit(*stream, std::move(operation));
  return fails ? kInvalidValue : kSuccess;
}

}  // namespace

Functions copy_calls() {
  return {
      SIMULATED(cuMemcpyAsync, copy_async),
      SIMULATED(cuMemcpy3DAsync, copy_strided_async),
      SIMULATED(cuMemcpyPeerAsync, copy_peer_async),
      SIMULATED(cuMemcpyBatchAsync, copy_batch_async),
  };
}

}  // namespace simulated
