#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace kvswap {

// Bytes [begin, end) that a copy reads or writes.
struct Span {
  uint64_t begin;
  uint64_t end;
  bool written;
  int64_t index;   // of the block or fragment in the caller's list
  int64_t tensor;  // index of the tensor in the caller's list
};

// Finds two spans that share a byte, if at least one of them is written. Sorts the spans.
std::optional<std::pair<Span, Span>> find_overlap(std::vector<Span>& spans);

}  // namespace kvswap
