#pragma once

#include <torch/csrc/stable/tensor.h>

#include <stdexcept>
#include <string>

#include "check.h"

// Checks of tensors that several ops share, and texts about them.
namespace kvswap {

using torch::stable::Tensor;

// "[2, 3]".
std::string shape_text(const Tensor& tensor);
std::string stride_text(const Tensor& tensor);

// The CUDA device of a tensor; -1 on the CPU.
int device_of(const Tensor& tensor);

// "cpu" or "cuda:0".
std::string device_text(int device);

void check_int64(const char* name, const Tensor& tensor);

void check_int64_on_cpu(const char* name, const Tensor& tensor);

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
