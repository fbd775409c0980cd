#pragma once

#include "copy/fragment.h"

namespace kvswap {

// Copies between host addresses before it returns. Not ordered with any stream.
void copy_on_host(const FragmentList& fragments);

}  // namespace kvswap
