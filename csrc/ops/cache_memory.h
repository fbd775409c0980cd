#pragma once

#include <cstdint>

// What the op _watch_cache returns, for the bindings, which include no header of torch.
namespace kvswap {

// Whether a tensor of the cache has other memory now. Called with the GIL held, so that no tensor
// changes meanwhile.
bool cache_has_moved(int64_t watched);
void release_cache(int64_t watched);

}  // namespace kvswap
