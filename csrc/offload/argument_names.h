#pragma once

#include <cstdint>
#include <string>

namespace kvswap {

// Names the caller's lists of ids in errors.
struct ArgumentNames {
  bool grouped;  // the caller passes a list for each group
  int group;

  // "gpu_block_ids", or "gpu_block_ids[1]" in group 1 of several.
  std::string list(const char* name) const {
    return grouped ? std::string(name) + "[" + std::to_string(group) + "]" : name;
  }
};

inline std::string item_of(const std::string& list, int64_t position) {
  return list + "[" + std::to_string(position) + "]";
}

}  // namespace kvswap
