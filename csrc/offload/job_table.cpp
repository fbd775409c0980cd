#include "offload/job_table.h"

#include <algorithm>
#include <string>
#include <utility>

#include "check.h"
#include "offload/argument_names.h"

namespace kvswap {
namespace {

// Characters of a source's error that the error of a job repeats.
constexpr size_t kMaxSourceError = 1000;

// The error of a source. A long chain of jobs that failed one after another loses those in the
// middle: what failed first is at the end.
std::string error_of(const Job& source) {
  std::string text = source.error.c_str();
  if (text.size() <= kMaxSourceError) return text;
  const size_t cut = text.rfind(": ", text.size() - kMaxSourceError);
  return cut == std::string::npos ? text : "..." + text.substr(cut);
}

// Of a job that was not done.
std::string how_it_ended(const Job& job) {
  return job.state == State::kCancelled ? " was cancelled" : " failed: " + error_of(job);
}

bool has_ended_without_success(const Job& job) { return job.has_ended() && !job.has_succeeded(); }

// Whether a job that reads what `source` writes must fail. A store with rejected blocks has written
// the others, and marked the slots of those that it rejected: a load of them rejects them too.
bool fails_readers(const Job& source) {
  const bool is_marked = source.channel == kStores && source.was_rejected();
  return has_ended_without_success(source) && !is_marked;
}

}  // namespace

JobTable::JobTable(const std::vector<Group>& groups) {
  for (const Group& group : groups) {
    slot_space_.push_back(group.slot_space);
    blocks_per_page_.push_back(group.blocks_per_page);
  }
  rebind(make_block_records(groups), make_slot_records(groups));
}

template <typename Visit>
void JobTable::for_each(const Work& work, const Visit& visit) noexcept {
  const int64_t *block = work.blocks(), *slot = work.slots();
  for (const JobPart& part : work.parts) {
    std::vector<JobNumbers>& at_block = latest_at_block_[block_space_[part.group]];
    std::vector<JobNumbers>& at_slot = latest_at_slot_[slot_space_[part.group]];
    for (size_t i = 0; i < part.count; ++i) visit(at_block[*block++], at_slot[*slot++]);
  }
}

template <typename Visit>
void JobTable::for_each(const BlockLists& blocks, const Visit& visit) const {
  for (size_t group = 0; group < blocks.size(); ++group) {
    const int space = block_space_[group];
    const std::vector<JobNumbers>& latest = latest_at_block_[space];
    for (size_t i = 0; i < blocks[group].size(); ++i) {
      const int64_t block = blocks[group][i];
      if (block == -1) continue;
      if (block < 0 || block >= static_cast<int64_t>(latest.size())) {
        const ArgumentNames names{blocks.size() > 1, static_cast<int>(group)};
        fail<IndexError>(item_of(names.list("gpu_block_ids"), i), " is ", block, "; there are ",
                         count_of(latest.size(), "GPU block"), ", 0 to ", latest.size() - 1);
      }
      visit(space, block, latest[block]);
    }
  }
}

std::vector<JobRef> JobTable::unended_at(const BlockLists& blocks) const {
  // Most blocks are not being copied, which their latest jobs show. Of the others the latest job
  // may have ended, as failed, before an earlier one.
  std::vector<std::pair<int, int64_t>> wanted;  // space and block
  for_each(blocks, [&](int space, int64_t block, const JobNumbers& latest) {
    if (*std::max_element(latest.begin(), latest.end()) >= first_unended_) {
      wanted.emplace_back(space, block);
    }
  });
  std::sort(wanted.begin(), wanted.end());
  const auto uses_one = [&](const Work& work) {
    const int64_t* block = work.blocks();
    for (const JobPart& part : work.parts) {
      const int space = block_space_[part.group];
      for (size_t i = 0; i < part.count; ++i, ++block) {
        if (std::binary_search(wanted.begin(), wanted.end(), std::make_pair(space, *block))) {
          return true;
        }
      }
    }
    return false;
  };
  std::vector<JobRef> found;
  for (int64_t id = first_unended_; !wanted.empty() && id < next_id_; ++id) {
    Job* job = find(id);
    if (job != nullptr && !job->has_ended() && uses_one(*job->work)) found.emplace_back(job);
  }
  return found;
}

std::vector<JobRef> JobTable::unreported_loads(const BlockLists& blocks) const {
  std::vector<int64_t> numbers;
  for_each(blocks, [&](int, int64_t, const JobNumbers& latest) {
    const int64_t load = latest_load(latest);
    if (find(load) != nullptr && (numbers.empty() || numbers.back() != load))
      numbers.push_back(load);
  });
  std::sort(numbers.begin(), numbers.end());
  numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
  std::vector<JobRef> loads;
  for (const int64_t number : numbers) loads.emplace_back(find(number));
  return loads;
}

// The part with the work's i-th block. i: less than work.count(); then counted within the part.
const JobPart& JobTable::part_of(const Work& work, size_t& i) {
  auto part = work.parts.begin();
  for (; i >= part->count; ++part) i -= part->count;
  return *part;
}

int JobTable::group_of(const Work& work, size_t i) { return part_of(work, i).group; }

// "page 7 (page_ids[2])": what the job reads its i-th block from.
std::string JobTable::source_name(const Job& job, size_t i) const {
  const Work& work = *job.work;
  size_t in_part = i;
  const int group = part_of(work, in_part).group;
  const ArgumentNames names{work.is_grouped, group};
  const auto position = static_cast<int64_t>(in_part);
  if (job.channel == kStores) {
    return "GPU block " + std::to_string(work.blocks()[i]) + " (" +
           item_of(names.list("gpu_block_ids"), position) + ")";
  }
  const int64_t per_page = blocks_per_page_[group], *slots = work.slots();
  const int64_t first_slot = slots[i - in_part] % per_page;
  return "page " + std::to_string(slots[i] / per_page) + " (" +
         item_of(names.list("page_ids"), (first_slot + position) / per_page) + ")";
}

// Why a job fails whose i-th block `source` was to write.
Reason JobTable::because_of(const Job& source, const Job& job, size_t i) const noexcept {
  const auto text = [&] {
    if (i == JobSource::kComputedFrom) {
      const std::string problem =
          "its blocks were computed from what " + source.name() +
          " should have loaded; when poll() has reported that load, compute them again: ";
      return problem + source.name() + how_it_ended(source);
    }
    const char* remedy = " must be stored again: ";
    if (job.channel == kStores) {
      remedy = " must be loaded again, or computed once poll() has reported the load: ";
    }
    if (source.was_rejected()) {  // a load, which no longer knows what it has loaded
      remedy =
          " is of a load that rejected blocks; when poll() has reported it, store the others: ";
    }
    return source_name(job, i) + remedy + source.name() + how_it_ended(source);
  };
  return Reason(text, "a job that writes what this one reads has failed; out of host memory",
                Reason::Kind::kSourceFailed);
}

int64_t JobTable::latest_store(const Work& work, size_t i) const noexcept {
  return latest_at_slot_[slot_space_[group_of(work, i)]][work.slots()[i]][kStores];
}

int64_t JobTable::latest_load(const Work& work, size_t i) const noexcept {
  return latest_load(latest_at_block_[block_space_[group_of(work, i)]][work.blocks()[i]]);
}

int64_t JobTable::slot_number(const Work& work, size_t i) const noexcept {
  return space_begin_[slot_space_[group_of(work, i)]] + work.slots()[i];
}

Job* JobTable::find(int64_t id) const {
  return id < first_id_ || id >= next_id_ ? nullptr : jobs_[id - first_id_].get();
}

Reason JobTable::prepare(Job& job) {
  find_overlaps(*job.work, job.channel);
  Reason failure = find_sources(job);
  while (first_id_ + static_cast<int64_t>(jobs_.size()) <= next_id_) jobs_.emplace_back();
  return failure;
}

// Sets `runs_after`.
void JobTable::find_overlaps(Work& work, int channel) noexcept {
  JobNumbers latest = kNoJobs;
  for_each(work, [&](const JobNumbers& at_block, const JobNumbers& at_slot) {
    for (int other = 0; other < kChannels; ++other) {
      // Two stores may read one block, two loads one slot.
      const bool both_store = channel == kStores && other == kStores;
      const bool both_load = channel != kStores && other != kStores;
      if (!both_store) latest[other] = std::max(latest[other], at_block[other]);
      if (!both_load) latest[other] = std::max(latest[other], at_slot[other]);
    }
  });
  for (const JobRef& load : work.computed_from) {
    latest[load->channel] = std::max(latest[load->channel], load->id);
  }
  work.runs_after = latest;
}

// Sets `sources`. Returns why the job cannot succeed, if one of them has failed already.
Reason JobTable::find_sources(Job& job) const {
  Reason failure;
  Work& work = *job.work;
  const bool is_store = job.channel == kStores;
  int64_t last = -1;
  std::vector<std::pair<int64_t, size_t>> sources;  // number, position
  for (size_t i = 0; i < work.count() && failure.empty(); ++i) {
    if (!is_store && num_invalid_ > 0) {
      const JobRef& failed = invalid_[slot_number(work, i)];
      if (failed) failure = because_of(*failed, job, i);
    }
    const int64_t number = is_store ? latest_load(work, i) : latest_store(work, i);
    if (number == last || number < 0) continue;
    last = number;
    const Job* source = find(number);
    if (source == nullptr) continue;
    if (!source->has_ended()) sources.emplace_back(number, i);
    if (is_store && has_ended_without_success(*source)) failure = because_of(*source, job, i);
  }
  for (const JobRef& load : work.computed_from) {
    if (!load->has_ended()) sources.emplace_back(load->id, JobSource::kComputedFrom);
    if (failure.empty() && has_ended_without_success(*load)) {
      failure = because_of(*load, job, JobSource::kComputedFrom);
    }
  }
  // Each source once, with its first position. A load of many blocks may have as many sources.
  std::sort(sources.begin(), sources.end());
  const auto is_same = [](const auto& a, const auto& b) { return a.first == b.first; };
  sources.erase(std::unique(sources.begin(), sources.end(), is_same), sources.end());
  for (const auto& [source, i] : sources) work.sources.push_back({JobRef(find(source)), i});
  return failure;
}

void JobTable::add(const JobRef& job) noexcept {
  job->id = next_id_++;
  jobs_[job->id - first_id_] = job;
  if (job->channel == kStores && num_invalid_ > 0) make_valid(*job);
  ++metrics_[job->channel].submitted;
  for_each(*job->work, [&](JobNumbers& at_block, JobNumbers& at_slot) {
    at_block[job->channel] = at_slot[job->channel] = job->id;
  });
}

Reason JobTable::source_failure(const Job& job) const noexcept {
  const JobSource* first = nullptr;
  for (const JobSource& source : job.work->sources) {
    const bool is_earlier = first == nullptr || source.position < first->position;
    if (is_earlier && fails_readers(*source.job)) first = &source;
  }
  return first == nullptr ? Reason() : because_of(*first->job, job, first->position);
}

void JobTable::finish(Job& job, State state, const Reason& error) noexcept {
  job.state = state;
  if (state == State::kFailed) job.error = error;
  const bool is_lost = error.kind() == Reason::Kind::kDeviceLost && job.channel == kStores;
  if (is_lost && job.pages != nullptr) job.pages->outcome = prefix::Outcome::kLost;
  unreported_failures_ += !job.has_succeeded();
  ChannelMetrics& metrics = metrics_[job.channel];
  if (job.has_succeeded() || job.was_rejected()) {
    metrics.blocks += job.work->count();
    metrics.encoded_blocks += job.work->encoded_blocks;
  }
  if (job.rejected != nullptr) metrics.rejected_blocks += job.rejected->size() - job.corrupted;
  metrics.corrupted_blocks += job.corrupted;
  if (job.has_succeeded()) {
    ++metrics.done;
    metrics.bytes += job.nbytes;
    metrics.link_bytes += job.link_bytes;
    ++metrics.jobs_by_copy_method[static_cast<int>(job.copy_method)];
    metrics.queue.observe(job.queue_seconds);
    metrics.copy.observe(job.copy_seconds);
  } else {
    ++(state == State::kFailed ? metrics.failed : metrics.cancelled);
    if (job.channel == kStores && !job.was_rejected()) invalidate_slots(job);
  }
  job.work.reset();
  unreported_.push_back(JobRef(&job));
  while (first_unended_ < next_id_) {
    const Job* first = find(first_unended_);
    if (first != nullptr && !first->has_ended()) break;
    ++first_unended_;
  }
}

int64_t JobTable::num_unended_until(int64_t id) const {
  int64_t count = 0;
  for (int64_t i = first_unended_; i <= id; ++i) {
    const Job* job = find(i);
    count += job != nullptr && !job->has_ended();
  }
  return count;
}

JobRef JobTable::report_first() noexcept {
  JobRef job = unreported_.pop_front();
  unreported_failures_ -= !job->has_succeeded();
  jobs_[job->id - first_id_] = JobRef();
  end_reservation(*job);
  while (first_id_ < next_id_ && !jobs_.front()) {
    jobs_.pop_front();
    ++first_id_;
  }
  return job;
}

void JobTable::end_reservations() noexcept {
  for (Job& job : unreported_) end_reservation(job);
}

void JobTable::end_reservation(Job& job) noexcept {
  if (job.pages == nullptr) return;
  // A cancelled load has written nothing that anybody reads; its pages are as they were.
  const bool was_cancelled = job.state == State::kCancelled && job.channel != kStores;
  if (job.error.kind() == Reason::Kind::kCorrupted) {
    job.pages->outcome = prefix::Outcome::kDamaged;
  } else if (job.pages->outcome != prefix::Outcome::kLost) {
    const bool is_done = job.has_succeeded() || was_cancelled || job.was_rejected();
    job.pages->outcome = is_done ? prefix::Outcome::kDone : prefix::Outcome::kFailed;
  }
  job.pages.reset();
}

void JobTable::record_submit(int channel, double seconds) noexcept {
  metrics_[channel].submit.observe(seconds);
}

// Marks the job's slots as invalid, except those that a later store writes or has written.
void JobTable::invalidate_slots(Job& job) noexcept {
  for (size_t i = 0; i < job.work->count(); ++i) {
    if (latest_store(*job.work, i) != job.id) continue;
    JobRef& store = invalid_[slot_number(*job.work, i)];
    num_invalid_ += !store;
    store = JobRef(&job);
  }
}

// From now on the slots hold what this store writes.
void JobTable::make_valid(const Job& store) noexcept {
  for (size_t i = 0; i < store.work->count(); ++i) make_valid(slot_number(*store.work, i));
}

void JobTable::make_valid(int64_t slot_number) noexcept {
  JobRef& failed = invalid_[slot_number];
  num_invalid_ -= static_cast<bool>(failed);
  failed = JobRef();
}

void JobTable::mark_written(const PageLists& pages) {
  const auto for_each_slot = [&](const auto& visit) {
    for (size_t group = 0; group < pages.size(); ++group) {
      for (const int64_t page : pages[group]) {
        const int64_t first = page * blocks_per_page_[group];
        for (int64_t slot = first; slot < first + blocks_per_page_[group]; ++slot) {
          visit(slot_space_[group], slot, page);
        }
      }
    }
  };
  for_each_slot([&](int space, int64_t slot, int64_t page) {
    const Job* store = find(latest_at_slot_[space][slot][kStores]);
    if (store == nullptr || store->has_ended()) return;
    fail<ValueError>("page ", page, " is being written by ", store->name(),
                     "; wait for that job before you write the page");
  });
  for_each_slot([&](int space, int64_t slot, int64_t) { make_valid(space_begin_[space] + slot); });
}

JobTable::BlockRecords JobTable::make_block_records(const std::vector<Group>& groups) const {
  BlockRecords blocks{{}, latest_at_block_};
  std::vector<int64_t> counts;  // by space
  for (const Group& group : groups) {
    blocks.spaces.push_back(group.block_space);
    counts.resize(std::max<size_t>(counts.size(), group.block_space + 1));
    counts[group.block_space] = std::max(counts[group.block_space], group.num_blocks);
  }
  blocks.latest.resize(counts.size());
  for (size_t space = 0; space < counts.size(); ++space) {
    blocks.latest[space].resize(counts[space], kNoJobs);
  }
  return blocks;
}

JobTable::SlotRecords JobTable::make_slot_records(const std::vector<Group>& groups) {
  std::vector<int64_t> counts;  // by space
  for (const Group& group : groups) {
    counts.resize(std::max<size_t>(counts.size(), group.slot_space + 1));
    int64_t& of_space = counts[group.slot_space];
    of_space = std::max(of_space, group.num_pages * group.blocks_per_page);
  }
  SlotRecords slots{{0}, {}, {}};
  for (const int64_t count : counts) {
    slots.begin.push_back(slots.begin.back() + count);
    slots.latest.emplace_back(count, kNoJobs);
  }
  slots.invalid.resize(slots.begin.back());
  return slots;
}

void JobTable::rebind(BlockRecords blocks, std::optional<SlotRecords> slots) noexcept {
  block_space_.swap(blocks.spaces);
  latest_at_block_.swap(blocks.latest);
  if (!slots) return;
  space_begin_.swap(slots->begin);
  latest_at_slot_.swap(slots->latest);
  invalid_.swap(slots->invalid);
  num_invalid_ = 0;
}

}  // namespace kvswap
