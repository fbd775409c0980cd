#pragma once

// The environment variables of the library. An op reads them at each call, a handler when it is
// made: no native thread may read them while a Python thread changes them. An unknown value throws.
namespace kvswap {

// KVSWAP_CHECK_ADDRESSES: whether swap_blocks_batch checks addresses before it uses them (0).
bool address_check_is_on();

// KVSWAP_LATE_CPU: whether jobs of a cache on the CPU copy only when somebody waits or polls (0).
bool cpu_is_late();

}  // namespace kvswap
