#include "ops/tensor_check.h"

#include <sstream>

namespace kvswap {
namespace {

std::string list_text(torch::headeronly::IntHeaderOnlyArrayRef values) {
  std::ostringstream text;
  text << "[";
  for (size_t i = 0; i < values.size(); ++i) text << (i == 0 ? "" : ", ") << values[i];
  text << "]";
  return text.str();
}

}  // namespace

std::string shape_text(const Tensor& tensor) { return list_text(tensor.sizes()); }

std::string stride_text(const Tensor& tensor) { return list_text(tensor.strides()); }

int device_of(const Tensor& tensor) { return tensor.is_cpu() ? -1 : tensor.get_device_index(); }

std::string device_text(int device) {
  return device < 0 ? "cpu" : "cuda:" + std::to_string(device);
}

void check_int64(const char* name, const Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  KVSWAP_CHECK(dtype == torch::headeronly::ScalarType::Long, name, " has dtype ",
               torch::headeronly::toString(dtype), "; expected Long (torch.int64)");
}

void check_int64_on_cpu(const char* name, const Tensor& tensor) {
  KVSWAP_CHECK(tensor.is_cpu(), name, " is on ", device_text(device_of(tensor)),
               "; expected a CPU tensor, call .cpu()");
  check_int64(name, tensor);
  check_storage(name, tensor);
}

void check_storage(const std::string& name, const Tensor& tensor) {
  if (tensor.numel() == 0) return;
  int64_t last = tensor.storage_offset();
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const int64_t needed = (last + 1) * static_cast<int64_t>(tensor.element_size());
  int64_t storage = 0;
  KVSWAP_CHECK(aoti_torch_get_storage_size(tensor.get(), &storage) == 0, name, " has no storage");
  KVSWAP_CHECK(storage >= needed, name, " reaches to byte ", needed, " of its storage, which has ",
               storage, "; it was freed or resized: bring its memory back first");
}

}  // namespace kvswap
