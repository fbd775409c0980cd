#pragma once

#include "copy/address_map.h"
#include "copy/fragment.h"

namespace kvswap {

// Throws unless every byte of every fragment is in memory that exists, on both sides. Device and
// pinned memory is checked against the driver's allocations; adjacent ones count as one range
// (expandable segments). Pageable memory is checked against the process's mappings. Throws also if
// a fragment writes bytes that another one reads or writes. Takes milliseconds: a debug mode.
void check_addresses(const FragmentList& fragments, AddressMap& addresses);

}  // namespace kvswap
