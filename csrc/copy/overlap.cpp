#include "copy/overlap.h"

#include <algorithm>

namespace kvswap {

std::optional<std::pair<Span, Span>> find_overlap(std::vector<Span>& spans) {
  std::sort(spans.begin(), spans.end(),
            [](const Span& a, const Span& b) { return a.begin < b.begin; });
  // The spans met so far that reach furthest: one overlaps the next span if any does.
  const Span* furthest_read = nullptr;
  const Span* furthest_write = nullptr;
  for (const Span& span : spans) {
    if (span.begin == span.end) continue;
    if (furthest_write != nullptr && span.begin < furthest_write->end) {
      return std::pair(*furthest_write, span);
    }
    if (span.written && furthest_read != nullptr && span.begin < furthest_read->end) {
      return std::pair(*furthest_read, span);
    }
    const Span*& furthest = span.written ? furthest_write : furthest_read;
    if (furthest == nullptr || furthest->end < span.end) furthest = &span;
  }
  return std::nullopt;
}

}  // namespace kvswap
