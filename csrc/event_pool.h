#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

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
  // destroy: does not throw.
  EventPool(std::function<void*()> create, std::function<void(void*)> destroy)
      : create_(std::move(create)), destroy_(std::move(destroy)) {}

  void* take() {
    if (idle_.empty()) {
      make_room(idle_, created_);
      void* const event = create_();
      ++created_;
      return event;
    }
    void* const event = idle_.back();
    idle_.pop_back();
    return event;
  }

  void give(void* event) noexcept {
    if (event != nullptr) idle_.push_back(event);
  }

  // How many exist, idle or not. Any thread may call.
  size_t num_created() const { return created_; }

  void destroy_idle() {
    for (void* const event : idle_) destroy_(event);
    created_ -= idle_.size();
    idle_.clear();
  }

 private:
  const std::function<void*()> create_;
  const std::function<void(void*)> destroy_;
  std::vector<void*> idle_;  // has room for all that exist
  std::atomic<size_t> created_{0};
};

}  // namespace kvswap
