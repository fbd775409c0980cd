#pragma once

#ifdef CUDA_VERSION
#include "../../same_abi.h"
#endif
#include "call.h"

// The functions of the driver by their names, a file for each noun.
namespace simulated {

// A function by its name. tests/unit/test_binary.py compiles the files of the calls also with the
// header of a CUDA release, which has to declare it alike.
#ifdef CUDA_VERSION
template <typename Theirs, typename Ours>
void* same_abi(Ours ours) {
  static_assert(SameAbi<Ours, Theirs>::value, "the header declares another prototype");
  return reinterpret_cast<void*>(ours);
}
#define SIMULATED(name, function) {#name, simulated::same_abi<decltype(&::name)>(&function)}
#else
#define SIMULATED(name, function) {#name, reinterpret_cast<void*>(&function)}
#endif

Functions context_calls();
Functions memory_calls();
Functions copy_calls();
Functions kernel_calls();
Functions stream_calls();
Functions event_calls();

}  // namespace simulated
