#include "offload/gate.h"

#include <algorithm>
#include <optional>

#include "check.h"

namespace kvswap {

volatile uint64_t* GateWords::take(StreamWords& memory, int count) {
  constexpr int kWordsAtOnce = 512;  // a page
  if (left_ < count) {
    const int size = std::max(count, kWordsAtOnce);
    next_ = memory.allocate_words(size);
    left_ = size;
  }
  volatile uint64_t* const taken = next_;
  for (int i = 0; i < count; ++i) taken[i] = 1;
  next_ += count;
  left_ -= count;
  return taken;
}

Gate::Gate(Device& device, int layer_groups, GateWords& words)
    : device(device), layer_groups(layer_groups), memory_(device.stream_words()) {
  KVSWAP_CHECK(memory_ != nullptr, "the streams of ", device.name(),
               " cannot wait for a word of memory, which a gate needs; let a stream wait for each "
               "job instead");
  try {
    opener_ = device.create_stream();
    closing_event_ = device.create_event(/*timed=*/false);
    opening_event_ = device.create_event(/*timed=*/false);
    words_ = words.take(*memory_, layer_groups);
  } catch (...) {
    destroy();
    throw;
  }
}

Gate::~Gate() { destroy(); }

void Gate::release(Gate* gate) {
  if (gate->references_.fetch_sub(1) > 1) return;
  std::optional<ContextGuard> context;
  try {
    context.emplace(gate->device);
  } catch (const std::exception&) {  // a lost device, where there is nothing to free any more
  }
  delete gate;
}

void Gate::destroy() {
  for (const Event event : {closing_event_, opening_event_}) {
    if (event != nullptr) device.destroy_event(event);
  }
  if (opener_ != nullptr) device.destroy_stream(opener_);
}

void Gate::set(int layer_group, uint64_t value, Stream stream) const {
  memory_->write_word(stream, &words_[layer_group], value);
}

void Gate::close(Stream current) {
  const ContextGuard context(device);
  if (was_opened_) device.wait_event(current, opening_event_);
  try {
    for (int layer_group = 0; layer_group < layer_groups; ++layer_group)
      set(layer_group, 0, current);
    device.record_event(closing_event_, current);
  } catch (...) {
    reopen(current);
    throw;
  }
  awaits_opening_ = true;
}

// Opens what was closed. If the driver refuses that, open() tries it again after this point of the
// stream.
void Gate::reopen(Stream current) noexcept {
  try {
    for (int layer_group = 0; layer_group < layer_groups; ++layer_group)
      set(layer_group, 1, current);
  } catch (const std::exception& error) {
    opening_error_ = Reason(error);
    awaits_opening_ = true;
    try {
      device.record_event(closing_event_, current);
    } catch (const std::exception&) {
      // open() then starts after an earlier point of the stream.
    }
  }
}

void Gate::enqueue_opening(const Transfer* transfer) {
  device.wait_event(opener_, closing_event_);
  for (int layer_group = 0; layer_group < layer_groups; ++layer_group) {
    if (transfer != nullptr) device.wait_event(opener_, transfer->ends[layer_group]);
    set(layer_group, 1, opener_);
  }
  device.record_event(opening_event_, opener_);
  was_opened_ = true;
}

Reason Gate::open_after(const Transfer& transfer) noexcept {
  try {
    enqueue_opening(&transfer);
    return {};
  } catch (const std::exception& error) {
    return Reason(error);
  }
}

void Gate::on_opening_enqueued() noexcept {
  awaits_opening_ = false;
  opening_error_ = {};
}

bool Gate::open() noexcept {
  try {
    enqueue_opening(nullptr);
    on_opening_enqueued();
    return true;
  } catch (const std::exception& error) {
    opening_error_ = Reason(error);
    return false;
  }
}

void Gate::open_from_host() noexcept {
  for (int layer_group = 0; layer_group < layer_groups; ++layer_group) words_[layer_group] = 1;
  on_opening_enqueued();
}

void Gate::wait(int layer_group, const StreamRef& stream) const {
  memory_->wait_for_word(stream, &words_[layer_group], 1);
}

}  // namespace kvswap
