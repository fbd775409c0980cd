#include "ops/library.h"
#include "ops/ops.h"

// Where the tensors of a cache have their memory, asked again and again.
namespace kvswap {
namespace {

struct CacheMemory {
  std::vector<Tensor> tensors;
  std::vector<int64_t> addresses;
  std::vector<int64_t> storage_ends;  // bytes that the storage of each tensor must have
};

}  // namespace

// References of its own to the tensors, as `.data =`, `set_()` and `resize_()` change what these
// refer to. The one call that would put another tensor in their place, `torch.utils.swap_tensors`,
// refuses a tensor to which there are other references.
int64_t watch_cache(const std::vector<Tensor>& tensors, const std::vector<int64_t>& addresses,
                    const std::vector<int64_t>& storage_ends) {
  return reinterpret_cast<int64_t>(new CacheMemory{tensors, addresses, storage_ends});
}

bool cache_has_moved(int64_t watched) {
  const auto& memory = *reinterpret_cast<const CacheMemory*>(watched);
  for (size_t i = 0; i < memory.tensors.size(); ++i) {
    const auto tensor = memory.tensors[i].get();
    const void* now = nullptr;
    int64_t storage = 0;
    if (torch_get_const_data_ptr(tensor, &now) || aoti_torch_get_storage_size(tensor, &storage)) {
      return true;
    }
    if (reinterpret_cast<int64_t>(now) != memory.addresses[i]) return true;
    if (storage < memory.storage_ends[i]) return true;
  }
  return false;
}

void release_cache(int64_t watched) { delete reinterpret_cast<CacheMemory*>(watched); }

}  // namespace kvswap
