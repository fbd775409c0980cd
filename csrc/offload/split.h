#pragma once

#include <vector>

#include "offload/group.h"
#include "offload/transfer.h"

// Divides what a transfer copies in one group, so that the link starts at once and stops late.
namespace kvswap {

// Copies some blocks of a staged transfer where they lie: the first ones of a store, while the
// first piece is packed, and the last ones of a load, while the last piece is unpacked. blocks: so
// many.
void split_edge(std::vector<TransferPart>& parts, const Group& group, int channel, size_t blocks);

// Leaves what would cost the submitting thread more than `seconds`. Returns the first part of that;
// the number of parts where nothing is left.
size_t split_later(std::vector<TransferPart>& parts, const Group& group, double seconds);

// Neighbours on the host are copied as one, whatever order the caller named them in.
void sort_by_slot(TransferPart& part);

}  // namespace kvswap
