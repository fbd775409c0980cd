#pragma once

#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

namespace kvswap::prefix {

class EndedPages;

// How a copy has ended. kFailed: nobody finds its blocks any more. kDone: the same holds for
// rejected ones only. kDamaged: and these have other bytes than were stored. kLost: as kFailed, but
// the copy may still run: nobody gets its pages before the handler is closed.
enum class Outcome { kFailed = 0, kDone = 1, kDamaged = 2, kLost = 3 };
using RejectedPages = std::vector<std::pair<uint32_t, int64_t>>;  // group and page, ascending

// What the copy of a reservation does with a page: nothing, load it, fill it from the GPU or from
// below, or write it there.
enum class Copy : uint8_t { kNone, kLoad, kStore, kPromotion, kWrite };

// A page that a reservation holds.
struct Pin {
  uint32_t group;
  uint32_t page;
  Copy copy;
};

// A reservation: the pages that a copy uses, until the manager is told of its end. It belongs to
// the job that copies.
struct ReservedPages {
  // outcome: if nobody notes another one.
  ReservedPages(std::weak_ptr<EndedPages> manager, Outcome outcome)
      : manager(std::move(manager)), outcome(outcome) {}
  ReservedPages(const ReservedPages&) = delete;
  ReservedPages& operator=(const ReservedPages&) = delete;

  const std::weak_ptr<EndedPages> manager;  // where the manager that has made it finds its own
  int64_t id = 0;                           // 0: the manager has not made it, or it has ended
  std::vector<Pin> pins;  // in the order of the keys; guarded by the manager's lock

  Outcome outcome;
  RejectedPages rejected;
  ReservedPages* next = nullptr;  // in EndedPages
};

// Ends a reservation: tells its manager, if there still is one.
struct EndPages {
  void operator()(ReservedPages* of) const noexcept;
};
// Nobody can lose a reservation, whose pages would stay held: reset() and the destructor end it.
using HeldPages = std::unique_ptr<ReservedPages, EndPages>;

// The reservations of a manager that have ended since its last call. Any thread may push, also
// with the scheduler's lock, and waits for nothing.
class EndedPages {
 public:
  EndedPages() = default;
  EndedPages(const EndedPages&) = delete;
  EndedPages& operator=(const EndedPages&) = delete;
  ~EndedPages() {
    for (ReservedPages* first = take(); first != nullptr;) delete std::exchange(first, first->next);
  }

  // Owns it from now on.
  void push(ReservedPages* of) noexcept {
    num_pages_ += of->pins.size();
    of->next = last_.load();
    while (!last_.compare_exchange_weak(of->next, of)) {
    }
  }
  size_t num_pages() const { return num_pages_; }

  // All of them, the first one first; the caller owns them.
  ReservedPages* take() noexcept {
    if (last_.load() == nullptr) return nullptr;
    ReservedPages *first = nullptr, *left = last_.exchange(nullptr);
    while (left != nullptr) {
      num_pages_ -= left->pins.size();
      ReservedPages* before = std::exchange(left->next, first);
      first = std::exchange(left, before);
    }
    return first;
  }

 private:
  std::atomic<ReservedPages*> last_ = nullptr;
  std::atomic<size_t> num_pages_ = 0;
};

inline void EndPages::operator()(ReservedPages* of) const noexcept {
  const auto to = of->id == 0 ? nullptr : of->manager.lock();
  if (to == nullptr) {
    delete of;
  } else {
    to->push(of);
  }
}

}  // namespace kvswap::prefix
