#pragma once

#include <cstddef>

// The environment variables of the library, read at each use.
namespace kvswap {

// KVSWAP_BATCH: whether scattered copies may go to the driver in one call (1).
bool batch_is_on();

// KVSWAP_BATCH_LIMIT: fragments in one driver call (8192).
size_t batch_limit();

// KVSWAP_CHECK_ADDRESSES: whether raw addresses are checked before they are used (0).
bool address_check_is_on();

}  // namespace kvswap
