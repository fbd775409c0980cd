#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <vector>

#include "cuda/driver.h"

namespace kvswap {

// Reserves room for more than `count` elements, so that adding the next one cannot fail.
template <typename Element>
void make_room(std::vector<Element>& elements, size_t count) {
  if (elements.capacity() <= count) elements.reserve(std::max<size_t>(16, 2 * count));
}

// Events for reuse. An event is given back, which cannot fail, when nothing will wait for its last
// record any more. One thread at a time. The context of the device is current.
class EventPool {
 public:
  explicit EventPool(unsigned flags) : flags_(flags) {}

  cuda::Event take() {
    if (idle_.empty()) {
      make_room(idle_, created_);
      cuda::Event event = nullptr;
      KVSWAP_DRIVER_CHECK(cuda::driver().create_event(&event, flags_), "cuEventCreate");
      ++created_;
      return event;
    }
    const cuda::Event event = idle_.back();
    idle_.pop_back();
    return event;
  }

  void give(cuda::Event event) noexcept {
    if (event != nullptr) idle_.push_back(event);
  }

  // How many exist, idle or not. Any thread may call.
  size_t created() const { return created_; }

  void destroy_idle() {
    // On a lost device this fails, and there is nothing to free any more.
    for (const cuda::Event event : idle_) cuda::driver().destroy_event(event);
    created_ -= idle_.size();
    idle_.clear();
  }

 private:
  const unsigned flags_;
  std::vector<cuda::Event> idle_;  // has room for all that exist
  std::atomic<size_t> created_{0};
};

}  // namespace kvswap
