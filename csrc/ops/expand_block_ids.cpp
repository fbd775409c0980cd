#include "kernels/expand_block_ids.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "check.h"
#include "cuda/context.h"
#include "cuda/stream.h"
#include "kernels/kernels.h"
#include "ops/ops.h"
#include "ops/tensor_check.h"

namespace kvswap {
namespace {

constexpr const char* kOp = "expand_block_ids";

int64_t output_count(const Tensor& block_ids, int64_t factor, int64_t skip_count,
                     std::optional<int64_t> count) {
  check_int64_list("block_ids", block_ids);
  KVSWAP_CHECK(factor >= 1, "block_size_factor is ", factor, "; expected 1 or more");
  int64_t total = 0;
  KVSWAP_CHECK(!__builtin_mul_overflow(block_ids.size(0), factor, &total), "block_size_factor is ",
               factor, ": ", block_ids.size(0), " ids expand to more than int64 can count");
  KVSWAP_CHECK(skip_count >= 0 && skip_count <= total, "skip_count is ", skip_count,
               ", but the ids expand to ", total, "; expected 0 to ", total);
  KVSWAP_CHECK(!count || *count >= 0, "count is ", count.value_or(0), "; expected 0 or more");
  return std::min(total - skip_count, count.value_or(total));
}

// Before anything is written.
void check_ids(const Expansion& e, int64_t first, int64_t last) {
  const int64_t largest = (std::numeric_limits<int64_t>::max() - e.factor + 1) / e.factor;
  // No id is larger than all their bits together: nearly always that is enough to know, and the
  // compiler reads several at once.
  int64_t bits = 0;
  for (int64_t block = first; block <= last; ++block) bits |= e.ids[block * e.id_stride];
  if (bits >= 0 && bits <= largest) return;
  for (int64_t block = first; block <= last; ++block) {
    const int64_t id = e.ids[block * e.id_stride];
    KVSWAP_CHECK(id >= 0 && id <= largest, "block_ids[", block, "] is ", id, "; expected 0 to ",
                 largest);
  }
}

// The outputs of one block, except those skipped and those after the last.
void expand_block(const Expansion& e, int64_t block) {
  const int64_t begin = std::max(block * e.factor, e.skip);
  const int64_t end = std::min((block + 1) * e.factor, e.skip + e.count);
  const int64_t offset = (e.ids[block * e.id_stride] - block) * e.factor;
  for (int64_t i = begin; i < end; ++i) e.out[(i - e.skip) * e.out_stride] = offset + i;
}

// Blocks `begin` to `end`, all of whose outputs are wanted, into dense memory. kFactor: the factor,
// or 0 if only the run time knows it. 100,000 ids by 1, 2 and 4 take 75, 99 and 124 us with the
// loop over the outputs of a block, 45, 67 and 83 us without. From 8 on nothing is gained.
template <int64_t kFactor>
void expand_whole_blocks(const Expansion& e, int64_t begin, int64_t end) {
  const int64_t factor = kFactor == 0 ? e.factor : kFactor;
  int64_t* __restrict out = e.out + (begin * factor - e.skip);
  for (int64_t block = begin; block < end; ++block, out += factor) {
    const int64_t first = e.ids[block * e.id_stride] * factor;
    for (int64_t j = 0; j < factor; ++j) out[j] = first + j;
  }
}

void expand_on_host(const Expansion& e) {
  const int64_t first = e.skip / e.factor, last = (e.skip + e.count - 1) / e.factor;
  check_ids(e, first, last);
  if (e.out_stride != 1) {
    for (int64_t block = first; block <= last; ++block) expand_block(e, block);
    return;
  }
  expand_block(e, first);
  if (first == last) return;
  expand_block(e, last);
  switch (e.factor) {
    case 1:
      return expand_whole_blocks<1>(e, first + 1, last);
    case 2:
      return expand_whole_blocks<2>(e, first + 1, last);
    case 4:
      return expand_whole_blocks<4>(e, first + 1, last);
    default:
      return expand_whole_blocks<0>(e, first + 1, last);
  }
}

void expand_on_cuda(Expansion expansion, int device) {
  constexpr int64_t kThreads = 256, kMaxBlocks = 4096;
  const cuda::StreamRef stream = cuda::current_stream(device);
  const cuda::ContextGuard context(device);
  const int64_t blocks = std::min((expansion.count + kThreads - 1) / kThreads, kMaxBlocks);
  cuda::launch(cuda::kernels(device).expand_block_ids, static_cast<unsigned>(blocks), kThreads, 0,
               stream.handle, expansion);
}

// The bytes from the first element to the last.
std::pair<uint64_t, uint64_t> extent(const Tensor& ids) {
  const auto begin = reinterpret_cast<uint64_t>(ids.const_data_ptr());
  const int64_t elements = ids.size(0) == 0 ? 0 : (ids.size(0) - 1) * ids.stride(0) + 1;
  return {begin, begin + static_cast<uint64_t>(elements) * sizeof(int64_t)};
}

void check_out(const Tensor& out, const Tensor& block_ids, int64_t outputs) {
  check_int64("out", out);
  const TensorDevice device = device_of(block_ids);
  KVSWAP_CHECK(device_of(out) == device, "out is on ", device_text(device_of(out)),
               ", but block_ids is on ", device_text(device), "; expected the same device");
  KVSWAP_CHECK(out.dim() == 1 && out.size(0) == outputs, "out has shape ", shape_text(out),
               "; expected [", outputs, "]");
  KVSWAP_CHECK(outputs < 2 || out.stride(0) > 0,
               "out has stride 0, so that its elements share memory; expected memory of its own");
  const auto [ids_begin, ids_end] = extent(block_ids);
  const auto [out_begin, out_end] = extent(out);
  if (!device.has_addresses() &&
      ids_begin - storage_offset_bytes(block_ids) != out_begin - storage_offset_bytes(out)) {
    return;  // two storages
  }
  KVSWAP_CHECK(out_end <= ids_begin || ids_end <= out_begin,
               "out and block_ids share memory; expected memory of its own");
}

void expand_into(const Tensor& block_ids, int64_t factor, int64_t skip_count, int64_t count,
                 const Tensor& out) {
  Expansion expansion;
  expansion.ids = static_cast<const int64_t*>(block_ids.const_data_ptr());
  expansion.id_stride = block_ids.stride(0);
  expansion.factor = factor;
  expansion.skip = skip_count;
  expansion.count = count;
  expansion.out = static_cast<int64_t*>(out.mutable_data_ptr());
  expansion.out_stride = out.stride(0);
  if (count == 0) return;
  if (block_ids.is_cpu()) return expand_on_host(expansion);
  expand_on_cuda(expansion, block_ids.get_device_index());
}

}  // namespace

Tensor expand_block_ids(const Tensor& block_ids, int64_t block_size_factor, int64_t skip_count,
                        std::optional<int64_t> count) {
  return with_op_name(kOp, [&] {
    const int64_t outputs = output_count(block_ids, block_size_factor, skip_count, count);
    Tensor out = torch::stable::new_empty(block_ids, {outputs});
    expand_into(block_ids, block_size_factor, skip_count, outputs, out);
    return out;
  });
}

void expand_block_ids_out(const Tensor& block_ids, int64_t block_size_factor, int64_t skip_count,
                          std::optional<int64_t> count, const Tensor& out) {
  with_op_name(kOp, [&] {
    const int64_t outputs = output_count(block_ids, block_size_factor, skip_count, count);
    check_out(out, block_ids, outputs);
    expand_into(block_ids, block_size_factor, skip_count, outputs, out);
  });
}

int64_t check_expand_block_ids(const Tensor& block_ids, int64_t block_size_factor,
                               int64_t skip_count, std::optional<int64_t> count,
                               const std::optional<Tensor>& out) {
  return with_op_name(kOp, [&] {
    const int64_t outputs = output_count(block_ids, block_size_factor, skip_count, count);
    if (out) check_out(*out, block_ids, outputs);
    return outputs;
  });
}

}  // namespace kvswap
