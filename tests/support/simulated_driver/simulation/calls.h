#pragma once

#include <set>
#include <string>

#include "call.h"

// The functions of the driver by their names, a file for each noun.
namespace simulated {

Functions context_calls();
Functions memory_calls();
Functions copy_calls();
Functions kernel_calls();
Functions stream_calls();
Functions event_calls();

// Functions of HIP that are not made of one of CUDA.
inline const std::set<std::string>& hip_only() {
  static const std::set<std::string> names = {"hipGetDevice", "hipSetDevice", "hipGetLastError",
                                              "hipMemGetAddressRange"};
  return names;
}

}  // namespace simulated
