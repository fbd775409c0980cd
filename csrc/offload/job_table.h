#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "offload/group.h"
#include "offload/job.h"
#include "offload/metrics.h"
#include "offload/request.h"

namespace kvswap {

// The jobs of a handler: which of them must not overlap, how each has ended, and which host slots
// hold nothing that may be loaded.
//
// Overlap. A store reads blocks and writes slots, a load reads slots and writes blocks. Two jobs
// must not overlap if they share a block or a slot that at least one of them writes. The jobs of a
// channel run in the order of their numbers, so a job only has to wait for the latest such job of
// each channel. The table therefore keeps, for each block and each slot, one number per channel.
//
// Failures. A job's sources are the jobs that write what it reads. It fails if one of them failed
// or was cancelled. A slot that a failed store should have written stays invalid until it is stored
// again. But a store that only rejected some blocks fails no load: it has marked their slots, and a
// load of such a slot rejects that block. A GPU block is invalid only until the failed load was
// reported: from then on the caller knows, and may write the block by other means. A store may name
// further loads, into blocks that its own were computed from: it runs, ends and fails as if it read
// those blocks.
//
// Only prepare() and make_block_records() allocate, so nothing after them fails for lack of memory.
//
// Not thread safe: the scheduler's lock guards it.
class JobTable {
 public:
  explicit JobTable(const std::vector<Group>& groups);
  ~JobTable() { end_reservations(); }

  // A new job.

  // Sets runs_after and sources, and reserves memory for add(). Returns why the job cannot succeed,
  // or an empty reason. May throw std::bad_alloc. Does not add the job.
  Reason prepare(Job& job);
  // Numbers and enters the job that was prepared last.
  void add(const JobRef& job) noexcept;

  // Ends.

  // Why the job must fail: one of its sources failed or was cancelled. Empty if none did.
  Reason source_failure(const Job& job) const noexcept;
  // Ends a job. To be called once for each. error: why it failed.
  void finish(Job& job, State state, const Reason& error) noexcept;

  // Who uses GPU blocks. blocks: one list for each group; -1 is no block.

  // The jobs that have not ended and read or write one of the blocks, in order of their numbers.
  std::vector<JobRef> unended_at(const BlockLists& blocks) const;
  // The latest load into each block, without loads that were reported.
  std::vector<JobRef> unreported_loads(const BlockLists& blocks) const;

  // From now on the slots of these pages, one list for each group, hold what the caller has written
  // there. Throws ValueError, with nothing changed, if a store that has not ended writes one.
  void mark_written(const PageLists& pages);

  // Reports.

  // The jobs that have ended and were not reported, in the order in which they ended.
  const EndedJobs& unreported() const { return unreported_; }
  // Whether one of them failed or was cancelled.
  bool has_unreported_failures() const { return unreported_failures_ > 0; }
  // Takes the first of them, which then counts as reported. Call it only if there is one.
  JobRef report_first() noexcept;
  // Tells the manager how the jobs have ended that were not reported. Reporting a job does that,
  // too.
  void end_reservations() noexcept;

  // The number of the job that was added last; -1 before the first.
  int64_t last_id() const { return next_id_ - 1; }
  // Whether all jobs up to this number have ended.
  bool all_have_ended_until(int64_t id) const { return first_unended_ > id; }
  bool all_have_ended() const { return all_have_ended_until(last_id()); }
  // How many jobs up to this number have not ended.
  int64_t num_unended_until(int64_t id) const;
  // The first job, queued or running, that has not ended. Call it only if there is one.
  const Job& oldest_unended() const { return *jobs_[first_unended_ - first_id_]; }

  // Counts.

  void record_submit(int channel, double seconds) noexcept;
  void record_transfer(int channel) noexcept { ++metrics_[channel].transfers; }
  const ChannelMetrics& metrics(int channel) const { return metrics_[channel]; }

  // Rebinding, while no job is outstanding.

  // What the table keeps of GPU blocks, for new groups. Made first, so that rebind() cannot fail.
  struct BlockRecords {
    std::vector<int> spaces;                      // block_space, by group
    std::vector<std::vector<JobNumbers>> latest;  // by space, then by id
  };
  BlockRecords make_block_records(const std::vector<Group>& groups) const;
  // The same of slots, for groups with other pools than before, to which no job has copied yet.
  struct SlotRecords {
    std::vector<int64_t> begin;                   // by space: the number of its first slot
    std::vector<std::vector<JobNumbers>> latest;  // by space, then by slot
    std::vector<JobRef> invalid;                  // by slot number
  };
  static SlotRecords make_slot_records(const std::vector<Group>& groups);
  // slots: null if the groups have the same pools as before.
  void rebind(BlockRecords blocks, std::optional<SlotRecords> slots) noexcept;

 private:
  // Calls visit(space, block, latest) for each of the blocks. Throws IndexError if there is none.
  template <typename Visit>
  void for_each(const BlockLists& blocks, const Visit& visit) const;
  // Calls visit(at_block, at_slot) with the latest jobs at each GPU block and slot of the work.
  template <typename Visit>
  void for_each(const Work& work, const Visit& visit) noexcept;
  static const JobPart& part_of(const Work& work, size_t& i);
  // The group of the work's i-th block.
  static int group_of(const Work& work, size_t i);
  std::string source_name(const Job& job, size_t i) const;
  Reason because_of(const Job& source, const Job& job, size_t i) const noexcept;
  // The latest store into the slot of the work's i-th block; -1 for none.
  int64_t latest_store(const Work& work, size_t i) const noexcept;
  // The latest load of the work's i-th GPU block; -1 for none.
  int64_t latest_load(const Work& work, size_t i) const noexcept;
  // The number of the slot of the work's i-th block, counted through all slots of the handler.
  int64_t slot_number(const Work& work, size_t i) const noexcept;
  void make_valid(int64_t slot_number) noexcept;

  // The job with this number; null when it was reported.
  Job* find(int64_t id) const;
  static int64_t latest_load(const JobNumbers& latest) {
    return std::max(latest[kLoads], latest[kExpedited]);
  }
  void find_overlaps(Work& work, int channel) noexcept;
  Reason find_sources(Job& job) const;
  void invalidate_slots(Job& job) noexcept;
  static void end_reservation(Job& job) noexcept;
  void make_valid(const Job& store) noexcept;

  std::vector<int> block_space_, slot_space_;  // by group; see Group
  std::vector<int64_t> blocks_per_page_;       // by group
  std::vector<int64_t> space_begin_;           // by slot space: the number of its first slot
  // The latest job of each channel at each GPU block and at each slot of a host page.
  std::vector<std::vector<JobNumbers>> latest_at_block_, latest_at_slot_;  // by space, then by id

  // By number, from the oldest job that was not reported; null where a job was reported. May end
  // with a null for the job that prepare() was called for.
  std::deque<JobRef> jobs_;
  int64_t first_id_ = 0;       // number of the first in jobs_
  int64_t first_unended_ = 0;  // number of the first that has not ended, queued or running
  int64_t next_id_ = 0;
  EndedJobs unreported_;
  size_t unreported_failures_ = 0;
  std::vector<JobRef> invalid_;  // by slot number: the store that was to fill it, or null
  size_t num_invalid_ = 0;
  ChannelMetrics metrics_[kChannels] = {};
};

}  // namespace kvswap
