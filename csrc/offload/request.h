#pragma once

#include <vector>

#include "offload/argument_names.h"
#include "offload/group.h"
#include "offload/job.h"
#include "offload/stream_point.h"

namespace kvswap {

// GPU blocks, one list for each group of the handler. -1 is no block.
using BlockLists = std::vector<std::vector<int64_t>>;
// Host pages, in the same form.
using PageLists = std::vector<std::vector<int64_t>>;

// What a caller asks a handler for.
struct Request {
  // In one group.
  struct Part {
    std::vector<int64_t> blocks, pages;
    int64_t first_slot = 0;
  };

  int channel;  // ChannelNumber
  int layer_groups = 1;
  bool is_grouped = false;   // errors name the group of an id
  std::vector<After> after;  // the job starts after all of these
  int64_t tag = 0;           // of the caller, who finds it in the job
  double began;              // when the caller called, as now() counts
  // GPU blocks. The job's blocks were computed from the latest load into each of them, unless that
  // was reported; see Work::computed_from.
  BlockLists computed_in;
  // What a job takes from its caller, if it is submitted; null: nothing.
  prefix::HeldPages* reserved = nullptr;
  std::vector<Part> parts;  // one for each group
};

// Turns requests into jobs, and checks them: a wrong request throws, and no job is made. Not thread
// safe: the scheduler's lock guards it.
class RequestReader {
 public:
  explicit RequestReader(const std::vector<Group>& groups);

  // groups: the groups of the constructor. Throws IndexError for an id out of range, ValueError for
  // other mistakes.
  JobRef read(const Request& request, const std::vector<Group>& groups);

 private:
  void add_part(Job& job, const Group& group, const ArgumentNames& names,
                const Request::Part& part);
  static void check_encoding(Work& work, const Group& group, int64_t num_blocks);
  void refuse_duplicates(std::vector<int64_t>& seen, const ArgumentNames& names, const char* name,
                         const int64_t* ids, int64_t count);

  // By block_space or slot_space, then by id of a block or a page: the number of the last request
  // that writes it.
  std::vector<std::vector<int64_t>> block_seen_, page_seen_;
  int64_t requests_ = 0;
};

}  // namespace kvswap
