#pragma once

#include <cstddef>
#include <vector>

#include "../cuda_driver.h"

namespace kvswap {

// Events with a time, made once and recorded again and again. Whoever takes one gives it back when
// nobody will wait for what it stands for any more. Not thread safe: the handler has a lock. The
// context of the device is current.
class EventPool {
 public:
  cuda::Event take() {
    if (idle_.empty()) {
      cuda::Event event = nullptr;
      KVSWAP_DRIVER_CHECK(cuda::driver().create_event(&event, cuda::kEventDefault),
                          "cuEventCreate");
      ++created_;
      return event;
    }
    const cuda::Event event = idle_.back();
    idle_.pop_back();
    return event;
  }

  void give(cuda::Event event) {
    if (event != nullptr) idle_.push_back(event);
  }

  // Those that exist, idle or not.
  size_t created() const { return created_; }

  void destroy_idle() {
    // On a lost device this fails, and there is nothing to free any more.
    for (const cuda::Event event : idle_) cuda::driver().destroy_event(event);
    created_ -= idle_.size();
    idle_.clear();
  }

 private:
  std::vector<cuda::Event> idle_;
  size_t created_ = 0;
};

}  // namespace kvswap
