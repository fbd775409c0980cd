#pragma once

#include "copy/fragment.h"

namespace kvswap {

// Copies between host addresses, done when it returns. Ordered with no stream.
void copy_on_host(const FragmentList& fragments);

}  // namespace kvswap
