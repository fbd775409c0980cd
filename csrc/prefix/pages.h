#pragma once

#include <memory>
#include <vector>

#include "prefix/events.h"
#include "prefix/eviction.h"

namespace kvswap::prefix {

// Of a page: it has no key; a job fills it; its bytes are those of its key; its key is forgotten,
// but somebody holds it still.
enum class PageState : uint8_t { kFree = 0, kFilling = 1, kReady = 2, kForgotten = 3 };

// The pages of one group of layers, and which key is on each.
class Pages {
 public:
  // No key gets a page before grow() has been called.
  Pages(int32_t group, size_t num_pages, PolicyKind kind, Events& events);

  // The first so many pages can be given to keys from now on; never fewer than before.
  void grow(size_t ready_pages);
  // Takes over what a reset keeps: which pages are ready, and how many were evicted. For pages that
  // are new.
  void follow(const Pages& before);
  // Of pages that are new: a job that began before the reset holds this one.
  void keep_held(uint32_t page);

  // The page of each key, or kNone.
  void find_all(const uint8_t* digests, size_t count, uint32_t* pages) const;

  uint32_t hash(const Digest& key) const { return table_.hash(key); }
  PageState state(uint32_t page) const { return static_cast<PageState>(table_.nodes[page].state); }
  bool is_ready(uint32_t page) const { return page != kNone && state(page) == PageState::kReady; }
  // Whether it has a key and nobody holds it, so that it can be given to another key.
  bool is_idle(uint32_t page) const { return is_ready(page) && table_.nodes[page].count == 0; }

  size_t num_ready() const { return num_ready_; }
  size_t num_free() const { return free_.size() + num_ready_ - num_tried_ - num_kept_; }
  size_t num_idle() const { return policy_->num_idle(); }
  size_t num_filling() const { return num_filling_; }
  uint64_t num_evicted() const { return num_evicted_; }

  // Nobody else gets a page while it is held.
  void hold(uint32_t page);
  void release(uint32_t page);
  // A page that is ready was asked for once more.
  void use(uint32_t page);
  // Each idle page among these is evicted before the one in front of it; the first one stays where
  // it is. Pages that the policy keeps in different lists are put in order list by list.
  void order(const uint32_t* pages, size_t count);

  // Gives a page to each of the keys at these places, all of them new and different, and holds it.
  // There must be as many free and idle ones. The pages ascend, so that neighbours are copied
  // together. Takes no memory, so it cannot fail halfway.
  void place(const uint8_t* digests, const std::vector<uint32_t>& places, uint32_t* pages);
  // What fills the page is done. False when its key was forgotten meanwhile.
  bool fill(uint32_t page);
  // From now on the key is on no page.
  void forget(uint32_t page);

 private:
  uint32_t take_free();
  void set_state(uint32_t page, PageState state);
  void free(uint32_t page);

  const int32_t group_;
  const size_t num_pages_;
  size_t num_ready_ = 0;
  Events& events_;
  Table table_;
  // Free are the pages of the list, and those from num_tried_ on that are ready, but for num_kept_
  // that keep_held() has named: growing to a million pages touches none of them.
  List free_;
  size_t num_tried_ = 0, num_kept_ = 0;
  std::unique_ptr<Policy> policy_;
  std::vector<Admission> admissions_;  // of the keys that are being placed: never grows
  size_t num_filling_ = 0;
  uint64_t num_evicted_ = 0;
};

}  // namespace kvswap::prefix
