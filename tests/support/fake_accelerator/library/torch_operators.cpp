// PyTorch's operators on the devices. Each is queued on the current stream and computed there by
// PyTorch's operator for the CPU; what cannot be queued is computed at once, by PyTorch's fallback.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <unordered_map>

#include "memory.h"
#include "torch_device.h"

namespace fake_accelerator {
namespace {

using Stack = torch::jit::Stack;

bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

// What a queued operation knows of a tensor. As on other devices it does not keep device memory;
// pinned memory it does, as PyTorch's allocators of pinned memory do.
class View {
 public:
  explicit View(const at::Tensor& tensor)
      : address_(static_cast<char*>(tensor.data_ptr())),
        sizes_(tensor.sizes().vec()),
        strides_(tensor.strides().vec()),
        dtype_(tensor.scalar_type()),
        bytes_(at::detail::computeStorageNbytes(sizes_, strides_, tensor.itemsize())),
        on_device_(on_device(tensor)) {
    TORCH_CHECK(!tensor.is_conj() && !tensor.is_neg(),
                "The fake accelerator has no conjugated or negated views");
    if (!on_device_) pinned_ = find_pinned(address_, bytes_);
  }

  size_t bytes() const { return bytes_; }
  bool is_pinned() const { return pinned_ != nullptr; }

  // The memory as a tensor of the CPU, which is there as long as `blocks` are.
  at::Tensor reach(std::vector<std::shared_ptr<Block>>& blocks) const {
    char* address = address_;
    if (on_device_ && bytes_) {
      blocks.push_back(find_block(address_, bytes_));
      if (!blocks.back()) throw Failure(freed(address_, bytes_));
      address = behind(address_);
    }
    return at::from_blob(address, sizes_, strides_, at::TensorOptions().dtype(dtype_));
  }

 private:
  char* address_;
  std::vector<int64_t> sizes_, strides_;
  at::ScalarType dtype_;
  size_t bytes_;
  bool on_device_;
  std::shared_ptr<Pinned> pinned_;
};

void copy_now(const View& dst, const View& src) {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  std::vector<std::shared_ptr<Block>> blocks;
  dst.reach(blocks).copy_(src.reach(blocks));
}

// Creation and views.

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(sizes, device_allocator(), c10::DispatchKeySet(kKey),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, device_allocator(),
                                           c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes,
                         std::optional<at::MemoryFormat> format) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(sizes);
  if (format) tensor->empty_tensor_restride(*format);
  const size_t bytes = at::detail::computeStorageNbytes(self.sizes(), self.strides(),
                                                        self.itemsize(), self.storage_offset());
  if (bytes > self.storage().nbytes()) resize_storage(self.storage(), bytes);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset,
                        at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(storage));
  if (strides.data())
    tensor->set_sizes_and_strides(sizes, strides);
  else
    tensor->set_sizes_contiguous(sizes);
  tensor->set_storage_offset(offset);
  return self;
}

void record_tensor(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), stream.device_index(), stream.id());
}

// Copies.

void copy_on_device(const at::Tensor& src, const at::Tensor& dst) {
  Device& on = Device::at(src.device().index());
  Device& other = Device::at(dst.device().index());
  const StreamId stream = current_stream(on.index), others = current_stream(other.index);
  const bool fails = on.enter(Call::kCopy);
  Work work;
  work.what = "copy " + std::to_string(src.nbytes()) + " bytes on the device";
  work.run = [from = View(src), to = View(dst)] { copy_now(to, from); };
  if (&on != &other) on.wait(stream, other.record(others));
  on.submit(stream, std::move(work), fails);
  if (&on != &other) other.wait(others, on.record(stream));
}

// Asynchronous where it is on other devices: with pinned memory that is copied byte by byte.
void copy_with_host(const at::Tensor& src, const at::Tensor& dst, bool non_blocking) {
  const bool to_host = on_device(src);
  const at::Tensor& host = to_host ? dst : src;
  Device& on = Device::at((to_host ? src : dst).device().index());
  const StreamId stream = current_stream(on.index);
  const bool fails = on.enter(Call::kCopy);
  const View from(src), to(dst);
  Work work;
  work.what = "copy " + std::to_string(host.nbytes()) +
              (to_host ? " bytes to the host" : " bytes to the device");
  work.copies = true;
  work.run = [from, to] { copy_now(to, from); };
  on.submit(stream, std::move(work), fails);
  on.count([to_host](Counters& counters) {
    ++(to_host ? counters.copies_to_host : counters.copies_to_device);
  });
  const bool pinned = (to_host ? to : from).is_pinned();
  if (!non_blocking || !pinned || !host.is_contiguous() || src.dtype() != dst.dtype())
    on.synchronize(stream);
}

at::Tensor copy_from(const at::Tensor& src, const at::Tensor& dst, bool non_blocking) {
  const at::Tensor source = src.expand(dst.sizes()).resolve_conj().resolve_neg();
  if (!dst.numel()) return dst;
  if (on_device(src) && on_device(dst))
    copy_on_device(source, dst);
  else
    copy_with_host(source, dst, non_blocking);
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& src, const at::Tensor& dst) {
  if (dst.sizes() != src.sizes()) dst.resize_(src.sizes());
  return copy_from(src, dst, false);
}

// PyTorch calls _copy_from() only for PrivateUse1.
at::Tensor& copy(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  copy_from(src, self, non_blocking);
  return self;
}

// All other operators.

at::Tensor to_meta(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

// The value with other tensors in it.
template <class Change>
c10::IValue with_tensors(const c10::IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const at::Tensor& tensor : value.toTensorVector()) changed.push_back(change(tensor));
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      changed.push_back(tensor ? std::optional(change(*tensor)) : std::nullopt);
    return changed;
  }
  return value;
}

// An operator with its arguments, in which tensors on the meta device stand for those of the
// device.
struct Kernel {
  c10::OperatorHandle op;
  Stack arguments;
  std::unordered_map<const c10::TensorImpl*, View> views;
  std::vector<std::pair<size_t, View>> results;  // new tensors, by their place among the results

  void operator()() const {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    std::vector<std::shared_ptr<Block>> blocks;
    std::unordered_map<const c10::TensorImpl*, at::Tensor> reached;
    for (const auto& [stands_for, view] : views) reached.emplace(stands_for, view.reach(blocks));
    Stack stack;
    for (const c10::IValue& argument : arguments)
      stack.push_back(with_tensors(argument, [&reached](const at::Tensor& tensor) {
        const auto found = reached.find(tensor.unsafeGetTensorImpl());
        return found == reached.end() ? tensor : found->second;
      }));
    op.callBoxed(&stack);
    for (const auto& [place, view] : results) view.reach(blocks).copy_(stack[place].toTensor());
  }
};

bool returns_new_or_written_tensors(const c10::FunctionSchema& schema) {
  return std::all_of(schema.returns().begin(), schema.returns().end(), [](const auto& result) {
    return result.type()->kind() == c10::TypeKind::TensorType &&
           (!result.alias_info() || result.alias_info()->isWrite());
  });
}

// Tensors of the CPU may be numbers, or indices, as on other devices.
void check_devices(c10::ArrayRef<c10::IValue> arguments) {
  std::optional<at::Device> device;
  const auto for_each = [arguments](auto check) {
    for (const c10::IValue& argument : arguments)
      with_tensors(argument, [&](const at::Tensor& tensor) {
        if (tensor.defined()) check(tensor, argument.isOptionalTensorList());
        return tensor;
      });
  };
  const auto check = [&device](const at::Tensor& tensor) {
    TORCH_CHECK(*device == tensor.device(),
                "Expected all tensors to be on the same device, but found at least two devices, ",
                *device, " and ", tensor.device(), "!");
  };
  for_each([&](const at::Tensor& tensor, bool) {
    if (on_device(tensor) && !device) device = tensor.device();
  });
  for_each([&](const at::Tensor& tensor, bool is_index) {
    if (on_device(tensor) || (tensor.dim() && !is_index)) check(tensor);
  });
}

// Queues the operator. False if what it returns cannot be known before it runs, or if its arguments
// are wrong: then the fallback says why.
bool launch(const c10::OperatorHandle& op, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const size_t count = schema.arguments().size();
  if (!returns_new_or_written_tensors(schema)) return false;
  const std::vector<c10::IValue> given(stack->end() - static_cast<int64_t>(count), stack->end());
  Kernel kernel{op, {}, {}, {}};
  // Of each tensor two tensors on the meta device: one for the call that finds shapes, which may
  // be in Python, and one for the queue, which Python never sees: its end needs no Python lock.
  std::unordered_map<const c10::TensorImpl*, std::pair<at::Tensor, at::Tensor>> stand_ins;
  std::vector<std::pair<at::Tensor, at::Tensor>> written;  // the tensor and the first of its two
  std::optional<at::Device> device;
  Stack meta;
  for (size_t i = 0; i < count; ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    // Random numbers are drawn in the order of the program.
    if (given[i].isStorage() || argument.type()->str().find("Generator") != std::string::npos)
      return false;
    const bool writes = argument.alias_info() && argument.alias_info()->isWrite();
    meta.push_back(with_tensors(given[i], [&](const at::Tensor& tensor) {
      if (!on_device(tensor)) return tensor;
      device = tensor.device();
      auto& [for_shapes, for_queue] = stand_ins[tensor.unsafeGetTensorImpl()];
      if (!for_shapes.defined()) for_shapes = to_meta(tensor), for_queue = to_meta(tensor);
      if (writes) written.emplace_back(tensor, for_shapes);
      return for_shapes;
    }));
    kernel.arguments.push_back(with_tensors(given[i], [&](const at::Tensor& tensor) {
      if (on_device(tensor)) return stand_ins[tensor.unsafeGetTensorImpl()].second;
      const bool is_number = tensor.defined() && tensor.unsafeGetTensorImpl()->is_wrapped_number();
      return !tensor.defined() || is_number ? tensor : tensor.clone();
    }));
  }
  if (!device) return false;

  try {
    op.callBoxed(&meta);
  } catch (const std::exception&) {
    return false;
  }
  for (const auto& [tensor, stand_in] : written)
    if (tensor.sizes() != stand_in.sizes()) tensor.resize_(stand_in.sizes());
  for (const c10::IValue& value : given)
    with_tensors(value, [&](const at::Tensor& tensor) {
      if (on_device(tensor))
        kernel.views.emplace(stand_ins[tensor.unsafeGetTensorImpl()].second.unsafeGetTensorImpl(),
                             View(tensor));
      return tensor;
    });

  std::vector<c10::IValue> results;
  for (size_t i = 0; i < meta.size(); ++i) {
    const at::Tensor& result = meta[i].toTensor();
    const auto found = std::find_if(written.begin(), written.end(), [&result](const auto& entry) {
      return entry.second.is_same(result);
    });
    if (found != written.end()) {
      results.emplace_back(found->first);
    } else {
      auto made =
          at::empty_strided(result.sizes(), result.strides(), result.options().device(*device));
      kernel.results.emplace_back(i, View(made));
      results.emplace_back(std::move(made));
    }
  }

  Device& on = Device::at(device->index());
  Work work;
  const bool fails = on.enter(Call::kKernel);
  work.what = schema.operator_name().name;
  work.run = std::move(kernel);
  on.submit(current_stream(on.index), std::move(work), fails);
  torch::jit::drop(*stack, count);
  for (c10::IValue& result : results) stack->push_back(std::move(result));
  return true;
}

void compute(const c10::OperatorHandle& op, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const auto space = schema.operator_name().getNamespace();
  TORCH_CHECK_NOT_IMPLEMENTED(space && *space == "aten", schema.operator_name(),
                              " has no kernel for fakeaccel");
  check_devices(torch::jit::last(*stack, schema.arguments().size()));
  if (!launch(op, stack)) at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, FAKE_TYPE, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view",
               static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef)>(at::native::view));
  library.impl("unfold", at::native::unfold);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("resize_", resize);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("set_.source_Storage",
               static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_));
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("record_stream", record_tensor);
  library.impl("_copy_from", copy_from);
  if (kType == c10::DeviceType::CUDA) library.impl("copy_", copy);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
}

TORCH_LIBRARY_IMPL(_, FAKE_TYPE, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>());
}

}  // namespace
}  // namespace fake_accelerator
