#pragma once

#include <string>
#include <vector>

#include "capi.h"
#include "offload/group.h"
#include "offload/job.h"

namespace kvswap {

// Makes jobs of requests. Checks all ids first, so a wrong request changes nothing. Not thread
// safe: the scheduler's lock guards it.
class RequestReader {
 public:
  // For requests for these groups.
  explicit RequestReader(const std::vector<Group>& groups);

  // groups: the same. Throws IndexError for an id out of range, ValueError for other mistakes.
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

  // By space, then by id of a block or a page: the last request with it as a destination.
  std::vector<std::vector<int64_t>> block_seen_, page_seen_;
  int64_t requests_ = 0;
};

}  // namespace kvswap
