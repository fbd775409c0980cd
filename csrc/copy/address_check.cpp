#include "copy/address_check.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>

#include "check.h"
#include "copy/overlap.h"

namespace kvswap {
namespace {

struct Mapping {
  uint64_t begin;
  uint64_t end;
  bool readable;
  bool writable;
};

std::vector<Mapping> process_mappings() {
  std::vector<Mapping> mappings;
  std::ifstream file("/proc/self/maps");
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    Mapping mapping{};
    char dash;
    std::string permissions;
    fields >> std::hex >> mapping.begin >> dash >> mapping.end >> permissions;
    mapping.readable = permissions.size() > 0 && permissions[0] == 'r';
    mapping.writable = permissions.size() > 1 && permissions[1] == 'w';
    mappings.push_back(mapping);  // the kernel lists them by address
  }
  return mappings;
}

// The first address in [begin, end) that no mapping with the access covers, or `end`.
uint64_t first_unmapped(const std::vector<Mapping>& mappings, uint64_t begin, uint64_t end,
                        bool write) {
  uint64_t address = begin;
  while (address < end) {
    const auto next =
        std::upper_bound(mappings.begin(), mappings.end(), address,
                         [](uint64_t value, const Mapping& m) { return value < m.begin; });
    if (next == mappings.begin()) return address;
    const Mapping& mapping = *std::prev(next);
    if (address >= mapping.end || !(write ? mapping.writable : mapping.readable)) return address;
    address = mapping.end;
  }
  return end;
}

// The first address in [begin, end) where the driver has no memory of the kind and device of
// `begin`, or `end`.
uint64_t first_unallocated(AddressMap& addresses, uint64_t begin, uint64_t end) {
  const Memory first = addresses.find(begin);
  uint64_t address = begin;
  while (address < end) {
    const Memory memory = addresses.find(address);
    if (memory.kind != first.kind || memory.device != first.device) return address;
    const uint64_t reached = addresses.mapped_until(address);
    if (reached <= address) return address;
    address = reached;
  }
  return end;
}

void check_range(AddressMap& addresses, const std::vector<Mapping>& mappings, const char* name,
                 uint64_t begin, uint64_t bytes, bool write, int64_t index) {
  const uint64_t end = begin + bytes;
  const bool pageable = addresses.find(begin).kind == MemoryKind::kPageable;
  const uint64_t reached = end < begin ? begin
                           : pageable  ? first_unmapped(mappings, begin, end, write)
                                       : first_unallocated(addresses, begin, end);
  KVSWAP_CHECK(reached == end && end >= begin, name, "[", index, "] is ", addresses.describe(begin),
               ", and of its ", bytes, " bytes only the first ", reached - begin,
               " lie in memory that can be ", write ? "written" : "read");
}

void check_overlap(const FragmentList& fragments) {
  std::vector<Span> spans;
  for (const Fragment& f : fragments.items()) {
    spans.push_back({f.src, f.src + f.bytes, false, f.index, 0});
    spans.push_back({f.dst, f.dst + f.bytes, true, f.index, 0});
  }
  if (const auto overlap = find_overlap(spans)) {
    const auto& [a, b] = *overlap;
    fail("bytes from ", hex(b.begin), " are ", b.written ? "written" : "read", " at index ",
         b.index, " and ", a.written ? "written" : "read", " at index ", a.index,
         "; copies of one call run in any order and must not overlap");
  }
}

}  // namespace

void check_addresses(const FragmentList& fragments, AddressMap& addresses) {
  const std::vector<Mapping> mappings = process_mappings();
  for (const Fragment& f : fragments.items()) {
    check_range(addresses, mappings, "src_ptrs", f.src, f.bytes, false, f.index);
    check_range(addresses, mappings, "dst_ptrs", f.dst, f.bytes, true, f.index);
  }
  check_overlap(fragments);
}

}  // namespace kvswap
