#include "ops/tensor_check.h"

#include <sstream>

namespace kvswap {
namespace {

using torch::headeronly::DeviceType;

std::string list_text(torch::headeronly::IntHeaderOnlyArrayRef values) {
  std::ostringstream text;
  text << "[";
  for (size_t i = 0; i < values.size(); ++i) text << (i == 0 ? "" : ", ") << values[i];
  text << "]";
  return text.str();
}

std::string type_text(DeviceType type) {
  switch (type) {
    case DeviceType::CPU:
      return "cpu";
    case DeviceType::CUDA:
      return "cuda";
    case DeviceType::HPU:
      return "hpu";
    case DeviceType::Meta:
      return "meta";
    case DeviceType::MPS:
      return "mps";
    case DeviceType::MTIA:
      return "mtia";
    case DeviceType::XPU:
      return "xpu";
    case DeviceType::PrivateUse1:
      return "privateuseone";
    default:
      return "device type " + std::to_string(static_cast<int>(type));
  }
}

}  // namespace

std::string shape_text(const Tensor& tensor) { return list_text(tensor.sizes()); }

std::string stride_text(const Tensor& tensor) { return list_text(tensor.strides()); }

TensorDevice device_of(const Tensor& tensor) {
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  // "cpu:0" is the same as "cpu".
  return {type, type == aoti_torch_device_type_cpu() ? -1 : tensor.get_device_index()};
}

std::string device_text(const TensorDevice& device) {
  const std::string type = type_text(static_cast<DeviceType>(device.type));
  return device.index < 0 ? type : type + ":" + std::to_string(device.index);
}

uint64_t storage_offset_bytes(const Tensor& tensor) {
  return static_cast<uint64_t>(tensor.storage_offset()) * tensor.element_size();
}

void check_int64(const char* name, const Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  KVSWAP_CHECK(dtype == torch::headeronly::ScalarType::Long, name, " has dtype ",
               torch::headeronly::toString(dtype), "; expected Long (torch.int64)");
  check_storage(name, tensor);
}

void check_int64_list(const char* name, const Tensor& tensor) {
  check_int64(name, tensor);
  KVSWAP_CHECK(tensor.dim() == 1, name, " has shape ", shape_text(tensor),
               "; expected one dimension");
}

void check_on_cpu(const char* name, const Tensor& tensor) {
  KVSWAP_CHECK(tensor.is_cpu(), name, " is on ", device_text(device_of(tensor)),
               "; expected a CPU tensor, call .cpu()");
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
