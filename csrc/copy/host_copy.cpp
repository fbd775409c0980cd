#include "copy/host_copy.h"

#include <cstring>

namespace kvswap {

void copy_on_host(const FragmentList& fragments) {
  for (const Fragment& fragment : fragments.items()) {
    std::memmove(reinterpret_cast<void*>(fragment.dst), reinterpret_cast<const void*>(fragment.src),
                 fragment.bytes);
  }
}

}  // namespace kvswap
