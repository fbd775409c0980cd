#pragma once

#include <cstddef>

// The environment variables of the library. An op reads them at each call, a handler when it is
// made: no native thread may read them while a Python thread changes them.
namespace kvswap {

// KVSWAP_BATCH: whether scattered copies may go to the driver in one call (1).
bool batch_is_on();

// KVSWAP_BATCH_LIMIT: fragments in one driver call (32).
size_t batch_limit();

// KVSWAP_CHECK_ADDRESSES: whether raw addresses are checked before they are used (0).
bool address_check_is_on();

// What they say about copies. Throws for an unknown value.
struct Environment {
  bool batch = batch_is_on();
  size_t batch_limit = kvswap::batch_limit();
  bool check_addresses = address_check_is_on();
};

}  // namespace kvswap
