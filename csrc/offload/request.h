#pragma once

#include <string>
#include <vector>

#include "capi.h"
#include "offload/argument_names.h"
#include "offload/group.h"
#include "offload/job.h"

namespace kvswap {

// Throws IndexError, with this name of the argument, if this process cannot use the page now: the
// pool has no such page, another process has it, or it is not pinned yet.
void check_page(const std::string& name, int64_t page, int64_t num_pages,
                const kvswap_ready_range& range);

// Turns requests into jobs, and checks them: a wrong request throws, and no job is made. Not thread
// safe: the scheduler's lock guards it.
class RequestReader {
 public:
  explicit RequestReader(const std::vector<Group>& groups);

  // groups: the groups of the constructor. Throws IndexError for an id out of range, ValueError for
  // other mistakes.
  JobRef read(const kvswap_request& request, const std::vector<Group>& groups);

 private:
  void add_part(Job& job, const Group& group, const ArgumentNames& names, const int64_t* blocks,
                const int64_t* pages, const int64_t* counts);
  static void add_encoded(Work& work, const std::string& page_list, int64_t num_blocks);
  void refuse_duplicates(std::vector<int64_t>& seen, const std::string& list, const int64_t* ids,
                         int64_t count);

  // By block_space or slot_space, then by id of a block or a page: the number of the last request
  // that writes it.
  std::vector<std::vector<int64_t>> block_seen_, page_seen_;
  int64_t requests_ = 0;
};

}  // namespace kvswap
