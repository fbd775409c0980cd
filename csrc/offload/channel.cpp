#include "offload/channel.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "check.h"

namespace kvswap {
namespace {

// Neighbours on the host are copied as one, whatever order the caller named them in.
void sort_by_slot(TransferPart& part) {
  if (std::is_sorted(part.slots.begin(), part.slots.end())) return;
  std::vector<size_t> order(part.slots.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](size_t one, size_t other) { return part.slots[one] < part.slots[other]; });
  const TransferPart old = part;
  for (size_t i = 0; i < order.size(); ++i) {
    part.blocks[i] = old.blocks[order[i]];
    part.slots[i] = old.slots[order[i]];
  }
}

// Equal in all ranks that load the same pages in the same way.
uint64_t hash_of(const Transfer& transfer) {
  uint64_t hash = mix_hash(1, static_cast<uint64_t>(transfer.layer_groups()));
  for (const TransferPart& part : transfer.parts) {
    hash = mix_hash(hash, static_cast<uint64_t>(part.group));
    hash = mix_hash(hash, part.slots.size());
    for (const int64_t slot : part.slots) hash = mix_hash(hash, static_cast<uint64_t>(slot));
  }
  return hash;
}

size_t count_states(const TransferPart& part, const std::vector<Group>& groups) {
  return groups[part.group].encoding->can_reject() ? part.blocks.size() : 0;
}

}  // namespace

Channel::Channel(int number, Device& device)
    : number_(number),
      device_(device),
      events_([&device] { return device.create_event(/*timed=*/true); },
              [&device](Event event) { device.destroy_event(event); }),
      points_(device) {
  // Now, because a busy GPU can hold up the creation of a stream.
  try {
    stream_ = device_.create_stream();
    event_stream_ = device_.create_stream();
    copier_ = device_.make_copier(stream_, number_ == kStores);
  } catch (...) {
    close();
    throw;
  }
}

size_t Channel::num_running_jobs() const {
  size_t jobs = 0;
  for (const auto& transfer : running_) jobs += transfer->jobs.size();
  return jobs;
}

std::shared_ptr<Transfer> Channel::newest_until(int64_t id) const {
  for (auto transfer = running_.rbegin(); transfer != running_.rend(); ++transfer) {
    if ((*transfer)->first_id() <= id) return *transfer;
  }
  return nullptr;
}

bool Channel::has_room_for(size_t entries) const {
  if (running_.empty()) return true;
  return running_.size() < kMaxRunning && entries_ + entries <= kMaxEntries;
}

// The caller may record an event again, or destroy it, before the job starts.
StreamPoint* Channel::record_point(const std::vector<After>& after) {
  if (after.size() == 1 && !after.front().is_event) return points_.record(after.front().handle);
  bool has_waited = false;
  for (const auto& [is_event, handle] : after) {
    StreamPoint* const point = is_event ? nullptr : points_.record(handle);
    const Event event = is_event ? static_cast<Event>(handle) : point ? point->event : nullptr;
    if (is_event ? device_.has_happened(event) : point == nullptr) continue;
    try {
      device_.wait_event(event_stream_, event, " for what the job starts after");
    } catch (...) {
      release_point(point);
      throw;
    }
    // A wait holds for the latest record before it, so the event may be recorded again.
    release_point(point);
    has_waited = true;
  }
  return has_waited ? points_.record(event_stream_) : nullptr;
}

Transfers Channel::make_transfer(int layer_groups, std::vector<TransferPart> parts,
                                 const std::vector<Group>& groups) {
  Transfers made{std::make_shared<Transfer>()};
  Transfer& transfer = *made.front();
  transfer.parts = std::move(parts);
  for (TransferPart& part : transfer.parts) {
    part.stores.resize(count_states(part, groups), kUnknownStore);
  }
  transfer.ends.reserve(layer_groups);
  try {
    transfer.start = events_.take();
    while (static_cast<int>(transfer.ends.size()) < layer_groups) {
      transfer.ends.push_back(events_.take());
    }
  } catch (...) {
    give_events(transfer);
    throw;
  }
  take_states(transfer, groups);
  return made;
}

void Channel::take_states(Transfer& transfer, const std::vector<Group>& groups) {
  size_t count = 0;
  for (const TransferPart& part : transfer.parts) count += count_states(part, groups);
  if (count == 0) return;
  transfer.states = states_.take(count);
  uint8_t* next = states_.at(transfer.states);
  for (TransferPart& part : transfer.parts) {
    const size_t of_part = count_states(part, groups);
    if (of_part != 0) part.states = std::exchange(next, next + of_part);
  }
}

void Channel::add_running(Transfers transfer) noexcept {
  entries_ += transfer.front()->entries;
  running_.splice(running_.end(), transfer);
}

void Channel::retire_first() noexcept {
  Transfers first;
  first.splice(first.end(), running_, running_.begin());
  entries_ -= first.front()->entries;
  retire(std::move(first));
}

void Channel::retire(Transfers transfer) noexcept {
  states_.give(transfer.front()->states);
  retired_.splice(retired_.end(), transfer);
  for (auto next = retired_.begin(); next != retired_.end();) {
    const auto waiting = next++;
    if (waiting->use_count() > 1) continue;
    give_events(**waiting);
    retired_.erase(waiting);
  }
}

void Channel::give_events(Transfer& transfer) noexcept {
  events_.give(transfer.start);
  for (const Event end : transfer.ends) events_.give(end);
}

Reason Channel::enqueue(Transfer& transfer, const std::vector<Event>& wait_events,
                        const std::vector<Group>& groups, int64_t layers, uint64_t bytes) noexcept {
  try {
    if (!transfer.has_begun) {
      for (const Event event : wait_events) device_.wait_event(stream_, event);
      copier_->start_after(wait_events);
      device_.record_event(transfer.start, stream_);
      for (TransferPart& part : transfer.parts) {
        if (part.method == CopyMethod::kStaged) sort_by_slot(part);
      }
      transfer.has_begun = true;
      if (transfer.is_exchanged()) {
        transfer.exchanged_load = exchange_->begin(hash_of(transfer), transfer.start);
      }
    }
    copy(transfer, groups, layers, bytes);
    return {};
  } catch (const std::exception& error) {
    return Reason(error);
  }
}

void Channel::copy(Transfer& transfer, const std::vector<Group>& groups, int64_t layers,
                   uint64_t bytes) {
  const bool has_pageable = std::any_of(groups.begin(), groups.end(),
                                        [](const Group& group) { return group.host_is_pageable; });
  list_copies(transfer, transfer.layer_group, groups, layers);
  const Stream end =
      copier_->copy(part_copies_, transfer.start, has_pageable, transfer.next, bytes);
  transfer.is_relayed |= copier_->has_relayed();
  if (transfer.next.part < part_copies_.size()) return;
  const bool is_last = transfer.layer_group + 1 == transfer.layer_groups();
  if (transfer.is_exchanged() && is_last) exchange_->finish();
  device_.record_event(transfer.ends[transfer.layer_group], end);
  ++transfer.layer_group;
  transfer.next = {};
}

void Channel::list_copies(Transfer& transfer, int layer_group, const std::vector<Group>& groups,
                          int64_t layers) {
  part_copies_.clear();
  for (TransferPart& part : transfer.parts) {
    const Group& group = groups[part.group];
    const SlabRange slabs = group.slabs_of(layer_group, transfer.layer_groups(), layers);
    if (slabs.begin == slabs.end) continue;
    part_copies_.push_back(
        {{&group.gpu, &group.host, slabs, part.blocks.data(), part.slots.data(), part.blocks.size(),
          number_ == kStores, part.before, part.after, part.states, part.stores.data()},
         part.method,
         group.encoding.get(),
         group.table.get(),
         &group.runs,
         part.is_head_or_tail});
  }
}

bool Channel::has_ended(Transfer& transfer) const {
  if (!transfer.end_seen) transfer.end_seen = device_.has_happened(transfer.ends.back());
  // After the end: what a lost relay should have copied is missing, or never comes.
  KVSWAP_CHECK(!transfer.is_relayed || copier_->relays_are_alive(),
               "a GPU in relays does not answer any more");
  return transfer.end_seen;
}

double Channel::copy_seconds(const Transfer& transfer) const {
  return device_.seconds_between(transfer.start, transfer.ends.back());
}

void Channel::close() {
  for (auto& transfer : retired_) give_events(*transfer);
  retired_.clear();
  events_.destroy_idle();
  points_.destroy();
  try {
    if (copier_ != nullptr) relayed_bytes_ = copier_->relayed_bytes();
  } catch (const std::bad_alloc&) {  // metrics forget them
  }
  copier_.reset();
  for (Stream* stream : {&stream_, &event_stream_}) {
    if (*stream != nullptr) device_.destroy_stream(*stream);
    *stream = nullptr;
  }
}

}  // namespace kvswap
