#pragma once

#include <memory>

#include "prefix/reserved_pages.h"

namespace kvswap::bindings {

// id: 0 if nothing is reserved.
struct Reservation {
  int64_t id = 0;
  // Of a prefix cache: its job takes them. Without a job they end as if nothing was copied.
  std::unique_ptr<prefix::ReservedPages> pages_of_job = {};

  Reservation() = default;
  Reservation(int64_t id, std::unique_ptr<prefix::ReservedPages> pages)
      : id(id), pages_of_job(std::move(pages)) {}
  Reservation(Reservation&&) = default;
  Reservation& operator=(Reservation&&) = default;
  ~Reservation() { let_go(); }

  // Whether it has not ended, and no job has taken it.
  bool is_held() const { return pages_of_job != nullptr; }

  // Ends it, if it is held. Returns whether it was.
  bool let_go() noexcept {
    if (!is_held()) return false;
    const auto to = pages_of_job->manager;
    to->push(std::move(pages_of_job));
    return true;
  }
};

}  // namespace kvswap::bindings
