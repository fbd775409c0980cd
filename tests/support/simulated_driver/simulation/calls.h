#pragma once

#include "call.h"

// The functions of the driver by their names, a file for each noun.
namespace simulated {

Functions context_calls();
Functions memory_calls();
Functions copy_calls();
Functions kernel_calls();
Functions stream_calls();
Functions event_calls();

}  // namespace simulated
