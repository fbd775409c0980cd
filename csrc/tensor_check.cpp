#include "tensor_check.h"

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

std::string device_text(const Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  return "cuda:" + std::to_string(tensor.get_device_index());
}

void check_int64_on_cpu(const char* name, const Tensor& tensor) {
  KVSWAP_CHECK(tensor.is_cpu(), name, " is on ", device_text(tensor),
               "; expected a CPU tensor, call .cpu()");
  const auto dtype = tensor.scalar_type();
  KVSWAP_CHECK(dtype == torch::headeronly::ScalarType::Long, name, " has dtype ",
               torch::headeronly::toString(dtype), "; expected Long (torch.int64)");
}

}  // namespace kvswap
