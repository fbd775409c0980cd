#include "capi.h"
#include "ops.h"

// Where the tensors of a cache have their memory, asked again and again.
namespace kvswap {
namespace {

struct CacheMemory {
  std::vector<Tensor> tensors;
  std::vector<int64_t> addresses;
};

}  // namespace

// References of its own to the tensors, as `.data =`, `set_()` and `resize_()` change what these
// refer to. The one call that would put another tensor in their place, `torch.utils.swap_tensors`,
// refuses a tensor to which there are other references.
int64_t watch_cache(const std::vector<Tensor>& tensors, const std::vector<int64_t>& addresses) {
  return reinterpret_cast<int64_t>(new CacheMemory{tensors, addresses});
}

}  // namespace kvswap

bool kvswap_cache_moved(const void* watched) {
  const auto& memory = *static_cast<const kvswap::CacheMemory*>(watched);
  for (size_t i = 0; i < memory.tensors.size(); ++i) {
    const void* now = nullptr;
    const auto failed = torch_get_const_data_ptr(memory.tensors[i].get(), &now);
    if (failed || reinterpret_cast<int64_t>(now) != memory.addresses[i]) return true;
  }
  return false;
}

void kvswap_cache_release(void* watched) { delete static_cast<kvswap::CacheMemory*>(watched); }
