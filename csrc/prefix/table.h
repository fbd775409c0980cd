#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

namespace kvswap::prefix {

constexpr size_t kKeyBytes = 32;
constexpr uint32_t kNone = UINT32_MAX;

struct Key {
  uint64_t words[4];
  bool operator==(const Key& other) const;
};

// The i-th key of an array.
Key key_at(const uint8_t* keys, size_t i);

// Of a page. kEmpty: it has no key, and is free unless it is held. kFilling: its key's bytes are
// being stored. kFilled: it has them.
enum class PageState : uint8_t { kEmpty = 0, kFilling = 1, kFilled = 2 };

// An entry of a table, which can also be in a List.
struct Node {
  Key key;
  uint32_t before, after;  // its neighbours in the list
  uint32_t count;          // Pages: how many hold the page. LookupCounter: lookups
  uint8_t list;            // of the policy, less than kMaxLists
  PageState state;
  // Of a page in the order of eviction: whether it has a place there, whether it got this while it
  // was held, and whether evictions have passed it since, because it was held.
  bool has_place : 1, was_placed_held : 1, was_passed : 1;
  uint8_t below;  // Pages: bits of a page's way to the second tier, see pages.h
};

// A hash table of nodes by their key. The constructor allocates all memory.
class Table {
 public:
  // May throw std::bad_alloc.
  explicit Table(size_t num_nodes);

  // The node of a key, or kNone.
  uint32_t find(const Key& key) const { return find(key, hash(key)); }
  // The node of each key, or kNone. Faster than find() for many keys, because it prefetches.
  void find_all(const uint8_t* keys, size_t count, uint32_t* found) const;

  // The key must not be in the table, and the node must have no key.
  void insert(uint32_t node, const Key& key);
  void erase(uint32_t node);

  // Seeded at random, so that keys cannot be chosen to collide.
  uint32_t hash(const Key& key) const;

  std::vector<Node> nodes;

 private:
  struct Slot {
    uint32_t hash, node;
  };
  uint32_t find(const Key& key, uint32_t hash) const;
  // The slot of a node that has a key.
  uint32_t slot_of(uint32_t node) const;
  // The slot where the search for a hash begins.
  uint32_t home(uint32_t hash) const { return static_cast<uint32_t>(uint64_t{hash} >> shift_); }

  std::vector<Slot> slots_;
  uint32_t mask_;
  int shift_;
  uint64_t seed_[4];
};

}  // namespace kvswap::prefix
