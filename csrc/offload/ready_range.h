#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace kvswap {

// The pages of a pool that jobs of this process may use. It changes while the pool is being pinned:
// publish() adds pages, from any thread.
class ReadyRange {
 public:
  ReadyRange(int64_t end_page, int64_t chunk_blocks)
      : chunk_blocks_(chunk_blocks), end_page_(end_page) {}

  // The end of the pages that are ready, which begin with page 0. Each submission reads it first,
  // and then sees these pages registered and their chunk_blocks().
  int64_t end_page() const { return end_page_.load(std::memory_order_acquire); }
  // Blocks registered in one piece, counted from the first page of the pool on. No driver copy may
  // span two pieces. Gets smaller only.
  const std::atomic<int64_t>& chunk_blocks() const { return chunk_blocks_; }

  void publish(int64_t end_page, int64_t chunk_blocks) {
    chunk_blocks_.store(chunk_blocks, std::memory_order_relaxed);
    end_page_.store(end_page, std::memory_order_release);
  }

 private:
  std::atomic<int64_t> chunk_blocks_, end_page_;
};

// Throws IndexError, with this name of the argument, if the page cannot be used now: the pool, of
// num_pages, has no such page, or it is not pinned yet.
void check_page(const std::string& name, int64_t page, int64_t num_pages, const ReadyRange& range);

}  // namespace kvswap
