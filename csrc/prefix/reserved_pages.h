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

// The pages that a job copies, from their reservation until the manager is told of the job's end.
// The job owns it.
struct ReservedPages {
  std::shared_ptr<EndedPages> manager;  // where the manager that has reserved them finds its own
  int64_t id = 0;                       // of the reservation
  size_t num_pages = 0;

  Outcome outcome = Outcome::kFailed;
  RejectedPages rejected;
  ReservedPages* next = nullptr;  // in a list
};

// The pages of a manager whose copies have ended since its last call. Any thread may push, also
// with the scheduler's lock, and waits for nothing.
class EndedPages {
 public:
  EndedPages() = default;
  EndedPages(const EndedPages&) = delete;
  EndedPages& operator=(const EndedPages&) = delete;
  ~EndedPages() {
    for (ReservedPages* first = take(); first != nullptr;) delete std::exchange(first, first->next);
  }

  void push(std::unique_ptr<ReservedPages> of) noexcept {
    num_pages_ += of->num_pages;
    ReservedPages* pushed = of.release();
    pushed->next = last_.load();
    while (!last_.compare_exchange_weak(pushed->next, pushed)) {
    }
  }
  size_t num_pages() const { return num_pages_; }

  // All of them, the first one first; the caller owns them.
  ReservedPages* take() noexcept {
    if (last_.load() == nullptr) return nullptr;
    ReservedPages *first = nullptr, *left = last_.exchange(nullptr);
    while (left != nullptr) {
      num_pages_ -= left->num_pages;
      ReservedPages* before = std::exchange(left->next, first);
      first = std::exchange(left, before);
    }
    return first;
  }

 private:
  std::atomic<ReservedPages*> last_ = nullptr;
  std::atomic<size_t> num_pages_ = 0;
};

}  // namespace kvswap::prefix
