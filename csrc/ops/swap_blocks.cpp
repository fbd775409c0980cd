#include "check.h"
#include "ops/copy_blocks.h"
#include "ops/ops.h"
#include "ops/tensor_check.h"

namespace kvswap {
namespace {

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
  check_int64_on_cpu(name, ids);
  KVSWAP_CHECK(ids.dim() == 1, name, " has shape ", shape_text(ids), "; expected one dimension");
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

}  // namespace

void swap_blocks(const Tensor& src, const Tensor& dst, int64_t block_size_in_bytes,
                 const Tensor& block_mapping) {
  with_op_name("swap_blocks", [&] {
    check_int64_on_cpu("block_mapping", block_mapping);
    KVSWAP_CHECK(block_mapping.dim() == 2 && block_mapping.size(1) == 2, "block_mapping has shape ",
                 shape_text(block_mapping), "; expected [n, 2]: pairs of source and destination");
    const BlockTensor src_blocks("src", src), dst_blocks("dst", dst);
    for (const BlockTensor* side : {&src_blocks, &dst_blocks}) {
      KVSWAP_CHECK(side->count == 0 || block_size_in_bytes == static_cast<int64_t>(side->bytes),
                   "block_size_in_bytes is ", block_size_in_bytes, ", but a block of ", side->name,
                   " has ", side->bytes, " bytes; expected the same");
    }
    copy_blocks({src_blocks}, {dst_blocks},
                {{"block_mapping[", ", 0]", read_column(block_mapping, 0)},
                 {"block_mapping[", ", 1]", read_column(block_mapping, 1)}});
  });
}

void swap_kv_blocks(const std::vector<Tensor>& src, const std::vector<Tensor>& dst,
                    const Tensor& src_block_ids, const Tensor& dst_block_ids) {
  with_op_name("swap_kv_blocks", [&] {
    KVSWAP_CHECK(src.size() == dst.size(), "src has ", src.size(), " tensors and dst has ",
                 dst.size(), "; expected a pair for each layer");
    const BlockIds ids = {{"src_block_ids[", "]", read_ids("src_block_ids", src_block_ids)},
                          {"dst_block_ids[", "]", read_ids("dst_block_ids", dst_block_ids)}};
    KVSWAP_CHECK(ids.src.ids.size() == ids.dst.ids.size(), "src_block_ids has ", ids.src.ids.size(),
                 " ids and dst_block_ids has ", ids.dst.ids.size(), "; expected as many");
    copy_blocks(block_tensors("src", src), block_tensors("dst", dst), ids);
  });
}

}  // namespace kvswap
