#pragma once

#include "copy/address_map.h"
#include "copy/fragment.h"

namespace kvswap {

// Throws unless every byte of every fragment lies in memory that exists, on both sides: device and
// pinned memory by the driver's allocations, of which several in a row count as one range
// (expandable segments), pageable memory by the process's mappings. Throws also where a fragment
// writes bytes that another one reads or writes. Costs milliseconds: a debug mode.
void check_addresses(const FragmentList& fragments, AddressMap& addresses);

}  // namespace kvswap
