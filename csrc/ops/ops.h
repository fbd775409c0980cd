#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

// The ops of torch_kvswap. Their schemas and docstrings are in torch_kvswap/ops.py.
namespace kvswap {

using torch::stable::Tensor;

void swap_blocks(const Tensor& src, const Tensor& dst, int64_t block_size_in_bytes,
                 const Tensor& block_mapping);

void swap_kv_blocks(const std::vector<Tensor>& src, const std::vector<Tensor>& dst,
                    const Tensor& src_block_ids, const Tensor& dst_block_ids);

void swap_blocks_batch(const Tensor& src_ptrs, const Tensor& dst_ptrs, const Tensor& sizes,
                       bool is_src_access_order_any);

Tensor expand_block_ids(const Tensor& block_ids, int64_t block_size_factor, int64_t skip_count,
                        std::optional<int64_t> count);

void expand_block_ids_out(const Tensor& block_ids, int64_t block_size_factor, int64_t skip_count,
                          std::optional<int64_t> count, const Tensor& out);

// The checks of these ops alone, for the kernels in torch_kvswap/devices/generic_ops.py. The last
// one returns how many ids there will be.
void check_swap_blocks(const Tensor& src, const Tensor& dst, int64_t block_size_in_bytes,
                       const Tensor& block_mapping);

void check_swap_kv_blocks(const std::vector<Tensor>& src, const std::vector<Tensor>& dst,
                          const Tensor& src_block_ids, const Tensor& dst_block_ids);

int64_t check_expand_block_ids(const Tensor& block_ids, int64_t block_size_factor,
                               int64_t skip_count, std::optional<int64_t> count,
                               const std::optional<Tensor>& out);

// Not for users: returns what cache_has_moved() checks, that the tensors have their memory at
// `addresses`.
int64_t watch_cache(const std::vector<Tensor>& tensors, const std::vector<int64_t>& addresses,
                    const std::vector<int64_t>& storage_ends);

}  // namespace kvswap
