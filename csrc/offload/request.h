#pragma once

#include <string>
#include <vector>

#include "capi.h"
#include "offload/group.h"
#include "offload/job.h"

namespace kvswap {

// Makes jobs of requests. Checks all ids, so that a wrong one is refused before anything is noted
// or copied. Not thread safe: the handler has a lock.
class RequestReader {
 public:
  // For jobs of these groups.
  explicit RequestReader(const std::vector<Group>& groups);

  // groups: those. Throws IndexError for an id out of range, ValueError for the rest.
  JobRef read(const kvswap_request& request, const std::vector<Group>& groups);

 private:
  struct Names {
    bool grouped;
    int group;
    // "gpu_block_ids", or "gpu_block_ids[1]" in group 1 of several.
    std::string list(const char* name) const;
  };
  void add_part(Job& job, const Group& group, const Names& names, const int64_t* blocks,
                const int64_t* pages, const int64_t* counts);
  void refuse_duplicates(std::vector<int64_t>& seen, const std::string& list, const int64_t* ids,
                         int64_t count);

  // For each id of a space of blocks or of pages: the last request in which it was a destination.
  std::vector<std::vector<int64_t>> block_seen_, page_seen_;
  int64_t requests_ = 0;
};

}  // namespace kvswap
