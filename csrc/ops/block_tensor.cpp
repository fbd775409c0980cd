#include "ops/block_tensor.h"

#include <algorithm>

#include "check.h"

namespace kvswap {
namespace {

using Order = std::vector<std::pair<int64_t, int64_t>>;

Order order_within_block(const Tensor& tensor) {
  Order order;
  for (int64_t d = 1; d < tensor.dim(); ++d) {
    if (tensor.size(d) != 1) order.emplace_back(tensor.size(d), tensor.stride(d));
  }
  return order;
}

bool is_dense(Order order) {
  std::sort(order.begin(), order.end(),
            [](const auto& a, const auto& b) { return a.second < b.second; });
  int64_t expected = 1;
  for (const auto& [size, stride] : order) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

bool is_row_major(const Order& order) {
  int64_t expected = 1;
  for (auto dim = order.rbegin(); dim != order.rend(); ++dim) {
    if (dim->second != expected) return false;
    expected *= dim->first;
  }
  return true;
}

}  // namespace

BlockTensor::BlockTensor(std::string tensor_name, const Tensor& tensor)
    : name(std::move(tensor_name)),
      base(reinterpret_cast<uint64_t>(tensor.data_ptr())),
      device(device_of(tensor)),
      offset(device.has_addresses() ? 0 : storage_offset_bytes(tensor)),
      order(order_within_block(tensor)) {
  check_storage(name, tensor);
  KVSWAP_CHECK(tensor.dim() >= 1, name, " has no dimension; expected blocks along dimension 0");
  count = tensor.size(0);
  const uint64_t element_bytes = tensor.element_size();
  pitch = static_cast<uint64_t>(tensor.stride(0)) * element_bytes;
  bytes = count == 0 ? 0 : static_cast<uint64_t>(tensor.numel() / count) * element_bytes;
  KVSWAP_CHECK(bytes == 0 || is_dense(order), name, " has shape ", shape_text(tensor),
               " and strides ", stride_text(tensor),
               ", so that a block has gaps or overlaps itself; expected every dimension but the "
               "first to be dense");
  KVSWAP_CHECK(count < 2 || pitch >= bytes, name, " has shape ", shape_text(tensor),
               " and strides ", stride_text(tensor), ": its blocks of ", bytes, " bytes lie ",
               pitch, " bytes apart and overlap; expected stride(0) of at least a block");
}

void check_same_block(const BlockTensor& src, const BlockTensor& dst) {
  KVSWAP_CHECK(src.bytes == dst.bytes || src.count == 0 || dst.count == 0, "a block of ", src.name,
               " has ", src.bytes, " bytes and a block of ", dst.name, " ", dst.bytes,
               "; expected the same");
  // As the bytes are equal, so are those of an element where the orders are.
  KVSWAP_CHECK(src.order == dst.order || (is_row_major(src.order) && is_row_major(dst.order)),
               "a block of ", src.name, " and a block of ", dst.name,
               " keep their elements in different orders of dimensions; expected the same shape "
               "and strides within a block, or contiguous blocks on both sides");
}

}  // namespace kvswap
