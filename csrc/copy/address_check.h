#pragma once

#include "copy/address_map.h"
#include "copy/fragment.h"

namespace kvswap {

// Throws unless every byte of every fragment is in memory that exists, on both sides. Device and
// pinned memory is checked against the driver's allocations; adjacent ones count as one range
// (expandable segments). Pageable memory is checked against /proc/self/maps. Also throws if a
// fragment writes bytes that another one reads or writes. Takes milliseconds: for debugging only.
void check_addresses(const FragmentList& fragments, AddressMap& addresses);

}  // namespace kvswap
