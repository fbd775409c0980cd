#include "ops/library.h"

#include <torch/csrc/stable/library.h>

#include "ops/ops.h"

// The index of the native code. Every op takes the same function on both keys: it looks at its
// tensors itself, and a CUDA tensor where a CPU one belongs gets an error that says so. On other
// devices the kernels are those of torch_kvswap/devices/generic_ops.py.
namespace {

using torch::stable::detail::StableLibrary;

void register_ops(StableLibrary& m) {
  m.impl("swap_blocks", TORCH_BOX(&kvswap::swap_blocks));
  m.impl("swap_kv_blocks", TORCH_BOX(&kvswap::swap_kv_blocks));
  m.impl("swap_blocks_batch", TORCH_BOX(&kvswap::swap_blocks_batch));
  m.impl("expand_block_ids", TORCH_BOX(&kvswap::expand_block_ids));
  m.impl("expand_block_ids.out", TORCH_BOX(&kvswap::expand_block_ids_out));
}

}  // namespace

// What Python asks of the native side about tensors. The ops for users are defined in
// torch_kvswap/ops.py.
STABLE_TORCH_LIBRARY_FRAGMENT(torch_kvswap, m) {
  m.def(
      "_check_swap_blocks(Tensor src, Tensor dst, int block_size_in_bytes, Tensor block_mapping)"
      " -> ()");
  m.def(
      "_check_swap_kv_blocks(Tensor[] src, Tensor[] dst, Tensor src_block_ids,"
      " Tensor dst_block_ids) -> ()");
  m.def(
      "_check_expand_block_ids(Tensor block_ids, int block_size_factor, int skip_count, int? count,"
      " Tensor? out) -> int");
  m.def("_watch_cache(Tensor[] tensors, int[] addresses, int[] storage_ends) -> int");
}
STABLE_TORCH_LIBRARY_IMPL(torch_kvswap, CPU, m) { register_ops(m); }
// On every device: they read no tensor's memory.
STABLE_TORCH_LIBRARY_IMPL(torch_kvswap, CompositeExplicitAutograd, m) {
  m.impl("_watch_cache", TORCH_BOX(&kvswap::watch_cache));
  m.impl("_check_swap_blocks", TORCH_BOX(&kvswap::check_swap_blocks));
  m.impl("_check_swap_kv_blocks", TORCH_BOX(&kvswap::check_swap_kv_blocks));
  m.impl("_check_expand_block_ids", TORCH_BOX(&kvswap::check_expand_block_ids));
}

void kvswap::register_cuda_ops() {
  static StableLibrary library(StableLibrary::Kind::IMPL, "torch_kvswap", "CUDA", __FILE__,
                               __LINE__);
  register_ops(library);
}
