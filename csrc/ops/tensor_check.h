#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "check.h"

// Checks of tensors that several ops share, and texts about them.
namespace kvswap {

using torch::stable::Tensor;

// The device of a tensor. Of any type, unlike torch::stable::Device.
struct TensorDevice {
  int32_t type;
  int32_t index;  // -1 on the CPU

  bool is_cpu() const { return type == aoti_torch_device_type_cpu(); }
  bool is_cuda() const { return type == aoti_torch_device_type_cuda(); }
  bool operator==(const TensorDevice& other) const {
    return type == other.type && index == other.index;
  }
  // Tells whether a data pointer is an address of the tensor's memory. On other devices PyTorch may
  // have something else in it, such as an object of the driver.
  bool has_addresses() const { return is_cpu() || is_cuda(); }
};

// "[2, 3]".
std::string shape_text(const Tensor& tensor);
std::string stride_text(const Tensor& tensor);

TensorDevice device_of(const Tensor& tensor);

// "cpu" or "cuda:0". A vendor's device is "privateuseone:0": the stable ABI does not tell its name.
std::string device_text(const TensorDevice& device);

uint64_t storage_offset_bytes(const Tensor& tensor);

void check_on_cpu(const char* name, const Tensor& tensor);

// The dtype and the storage.
void check_int64(const char* name, const Tensor& tensor);

// check_int64(), and one dimension.
void check_int64_list(const char* name, const Tensor& tensor);

// Throws if the storage is smaller than the tensor, as after untyped_storage().resize_(0).
void check_storage(const std::string& name, const Tensor& tensor);

// Runs the body of an op and puts the op's name before the message of what it throws.
template <typename Body>
auto with_op_name(const char* op, const Body& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    throw std::runtime_error(std::string("torch_kvswap::") + op + ": " + error.what());
  }
}

}  // namespace kvswap
