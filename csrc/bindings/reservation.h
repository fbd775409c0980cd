#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/python.h"
#include "prefix/manager.h"
#include "prefix/reserved_pages.h"

namespace kvswap::bindings {

// Pages that are held for a copy.
struct Reservation {
  int64_t id = 0;              // 0: nothing is reserved
  bool fills = false;          // the copy writes the pages
  bool has_groups = false;     // Python gets a list with an array for each group
  bool may_be_dropped = true;  // false: when it is dropped, its copy may still run
  prefix::Assigned assigned = {};
  nb::object lease = nb::none();
  // A job of a prefix cache takes them.
  prefix::HeldPages pages_of_job;

  // outcome: if nothing is copied.
  Reservation(std::shared_ptr<prefix::EndedPages> manager, prefix::Outcome outcome)
      : pages_of_job(new prefix::ReservedPages(std::move(manager), outcome)) {}
  Reservation(Reservation&&) = default;
  Reservation& operator=(Reservation&&) = default;
  ~Reservation() {
    if (is_held() && !may_be_dropped) pages_of_job->outcome = prefix::Outcome::kLost;
  }

  // After the manager's call: whether this has made it.
  bool begin() {
    id = pages_of_job->id;
    return id != 0;
  }
  // Whether it has not ended, and no job has taken it.
  bool is_held() const { return id != 0 && pages_of_job != nullptr; }

  nb::any python_indices() { return numbers(indices_made_, assigned.key_indices); }
  nb::any python_pages() { return numbers(pages_made_, assigned.pages); }

  // Ends it, if it is held. Returns whether it was.
  bool let_go() noexcept {
    if (!is_held()) return false;
    pages_of_job.reset();
    return true;
  }

  // How its copy has ended, before its end. It must be held. rejected: in any order.
  void note(prefix::Outcome outcome, prefix::RejectedPages rejected) noexcept {
    std::sort(rejected.begin(), rejected.end());
    pages_of_job->outcome = outcome;
    pages_of_job->rejected = std::move(rejected);
  }

 private:
  // Made when it is first asked for.
  nb::any numbers(nb::object& made, const std::vector<int64_t>& of) const {
    if (made.is_valid()) return as_any(made);
    if (!has_groups) return as_any(made = to_numpy(of));
    nb::list several;
    auto next = of.begin();
    for (const int64_t count : assigned.counts) {
      several.append(to_numpy({next, next + count}));
      next += count;
    }
    return as_any(made = several);
  }

  nb::object indices_made_, pages_made_;
};

}  // namespace kvswap::bindings
