#include "ops/expand_block_ids.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "check.h"
#include "cuda/context.h"
#include "cuda/kernels.h"
#include "cuda/stream.h"
#include "ops/ops.h"
#include "ops/tensor_check.h"

namespace kvswap {
namespace {

constexpr const char* kOp = "expand_block_ids";

int64_t output_count(const Tensor& block_ids, int64_t factor, int64_t skip_count,
                     std::optional<int64_t> count) {
  check_int64("block_ids", block_ids);
  KVSWAP_CHECK(block_ids.dim() == 1, "block_ids has shape ", shape_text(block_ids),
               "; expected one dimension");
  check_storage("block_ids", block_ids);
  KVSWAP_CHECK(factor >= 1, "block_size_factor is ", factor, "; expected 1 or more");
  int64_t total = 0;
  KVSWAP_CHECK(!__builtin_mul_overflow(block_ids.size(0), factor, &total), "block_size_factor is ",
               factor, ": ", block_ids.size(0), " ids expand to more than int64 can count");
  KVSWAP_CHECK(skip_count >= 0 && skip_count <= total, "skip_count is ", skip_count,
               ", but the ids expand to ", total, "; expected 0 to ", total);
  KVSWAP_CHECK(!count || *count >= 0, "count is ", count.value_or(0), "; expected 0 or more");
  return std::min(total - skip_count, count.value_or(total));
}

int64_t bits_of(const int64_t* ids, int64_t stride, int64_t count) {
  int64_t bits = 0;
  for (int64_t i = 0; i < count; ++i) bits |= ids[i * stride];
  return bits;
}

// Before anything is written.
void check_ids(const Expansion& e, int64_t first, int64_t last) {
  const int64_t largest = (std::numeric_limits<int64_t>::max() - e.factor + 1) / e.factor;
  // No id is larger than all their bits together: nearly always that is enough to know, and the
  // compiler reads several at once. It has to know that they are dense.
  const int64_t *ids = e.ids + first * e.id_stride, count = last - first + 1;
  const int64_t bits = e.id_stride == 1 ? bits_of(ids, 1, count) : bits_of(ids, e.id_stride, count);
  if (bits >= 0 && bits <= largest) return;
  for (int64_t block = first; block <= last; ++block) {
    const int64_t id = e.ids[block * e.id_stride];
    KVSWAP_CHECK(id >= 0 && id <= largest, "block_ids[", block, "] is ", id, "; expected 0 to ",
                 largest);
  }
}

// Outputs `i` to `end`, all of block `block`.
void expand_part(const Expansion& e, int64_t block, int64_t i, int64_t end) {
  const int64_t offset = (e.ids[block * e.id_stride] - block) * e.factor + e.skip;
  for (; i < end; ++i) e.out[i * e.out_stride] = offset + i;
}

constexpr int64_t kStep = 16;

// Whole blocks into dense memory. A small factor that the compiler knows is a few stores without a
// loop; 0 is one that is known at run time only. kDense: so are the ids.
template <bool kDense, size_t kFactor>
void expand_whole(const Expansion& e, int64_t block, int64_t blocks, int64_t* __restrict out) {
  const int64_t factor = kFactor == 0 ? e.factor : kFactor, stride = kDense ? 1 : e.id_stride;
  const int64_t* ids = e.ids + block * stride;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t offset = ids[b * stride] * factor;
    int64_t j = 0, *of_block = out + b * factor;
    for (; j + kStep <= factor; j += kStep) {
      for (int64_t k = 0; k < kStep; ++k) of_block[j + k] = offset + j + k;
    }
    for (; j < factor; ++j) of_block[j] = offset + j;
  }
}

using ExpandWhole = void (*)(const Expansion&, int64_t, int64_t, int64_t*);

template <bool kDense, size_t... kFactors>
ExpandWhole expand_whole_by(int64_t factor, std::index_sequence<kFactors...>) {
  constexpr ExpandWhole functions[] = {&expand_whole<kDense, kFactors>...};
  return functions[factor < static_cast<int64_t>(sizeof...(kFactors)) ? factor : 0];
}

ExpandWhole expand_whole_for(const Expansion& e) {
  constexpr auto kFactors = std::make_index_sequence<kStep + 1>();
  return e.id_stride == 1 ? expand_whole_by<true>(e.factor, kFactors)
                          : expand_whole_by<false>(e.factor, kFactors);
}

void expand_on_host(const Expansion& e) {
  const int64_t first = e.skip / e.factor;
  const int64_t last = (e.skip + e.count - 1) / e.factor;
  check_ids(e, first, last);
  int64_t block = first, i = 0;
  const auto end_of = [&](int64_t of) { return std::min((of + 1) * e.factor - e.skip, e.count); };
  if (e.out_stride == 1) {  // all but the first and the last are whole
    expand_part(e, block, 0, end_of(block));
    i = end_of(block++);
    const int64_t whole = std::max<int64_t>(last - block, 0);
    expand_whole_for(e)(e, block, whole, e.out + i);
    i += whole * e.factor;
    block += whole;
  }
  for (; block <= last; i = end_of(block++)) expand_part(e, block, i, end_of(block));
}

void expand_on_cuda(Expansion expansion, int device) {
  constexpr int64_t kThreads = 256, kMaxBlocks = 4096;
  const cuda::StreamRef stream = cuda::current_stream(device);
  const cuda::ContextGuard context(device);
  const int64_t blocks = std::min((expansion.count + kThreads - 1) / kThreads, kMaxBlocks);
  void* arguments[] = {&expansion};
  KVSWAP_DRIVER_CHECK(
      cuda::driver().launch(cuda::kernels(device).expand_block_ids, static_cast<unsigned>(blocks),
                            1, 1, kThreads, 1, 1, 0, stream.handle, arguments, nullptr),
      "cuLaunchKernel");
}

// The bytes from the first element to the last.
std::pair<uint64_t, uint64_t> extent(const Tensor& ids) {
  const auto begin = reinterpret_cast<uint64_t>(ids.const_data_ptr());
  const int64_t elements = ids.size(0) == 0 ? 0 : (ids.size(0) - 1) * ids.stride(0) + 1;
  return {begin, begin + static_cast<uint64_t>(elements) * sizeof(int64_t)};
}

void check_out(const Tensor& out, const Tensor& block_ids, int64_t outputs) {
  check_int64("out", out);
  const int device = device_of(block_ids);
  KVSWAP_CHECK(device_of(out) == device, "out is on ", device_text(device_of(out)),
               ", but block_ids is on ", device_text(device), "; expected the same device");
  KVSWAP_CHECK(out.dim() == 1 && out.size(0) == outputs, "out has shape ", shape_text(out),
               "; expected [", outputs, "]");
  check_storage("out", out);
  KVSWAP_CHECK(outputs < 2 || out.stride(0) > 0,
               "out has stride 0, so that its elements share memory; expected memory of its own");
  const auto [ids_begin, ids_end] = extent(block_ids);
  const auto [out_begin, out_end] = extent(out);
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

}  // namespace kvswap
