#include "prefix/table.h"

#include <string.h>

#include <algorithm>
#include <random>

namespace kvswap::prefix {
namespace {

constexpr size_t kAtOnce = 64;  // keys that are prefetched together

uint64_t mix(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

}  // namespace

bool Key::operator==(const Key& other) const {
  return memcmp(words, other.words, sizeof(words)) == 0;
}

Key key_at(const uint8_t* keys, size_t i) {
  static_assert(sizeof(Key) == kKeyBytes);
  Key key;
  memcpy(&key, keys + i * kKeyBytes, kKeyBytes);
  return key;
}

Table::Table(size_t num_nodes) : nodes(num_nodes) {
  int bits = 1;
  while ((size_t{1} << bits) < 2 * num_nodes) ++bits;  // at most half of the slots are taken
  slots_.assign(size_t{1} << bits, Slot{0, kNone});
  mask_ = static_cast<uint32_t>(slots_.size() - 1);
  shift_ = 32 - bits;
  std::random_device random;
  for (uint64_t& part : seed_) part = uint64_t{random()} << 32 | random();
}

uint32_t Table::hash(const Key& key) const {
  const uint64_t* words = key.words;
  const uint64_t halves =
      mix(words[0] ^ seed_[0], words[1] ^ seed_[1]) ^ mix(words[2] ^ seed_[2], words[3] ^ seed_[3]);
  return static_cast<uint32_t>(mix(halves, seed_[0] | 1) >> 32);
}

uint32_t Table::find(const Key& key, uint32_t hash) const {
  for (uint32_t at = home(hash); slots_[at].node != kNone; at = (at + 1) & mask_) {
    const Slot& slot = slots_[at];
    if (slot.hash == hash && nodes[slot.node].key == key) return slot.node;
  }
  return kNone;
}

void Table::find_all(const uint8_t* keys, size_t count, uint32_t* found) const {
  uint32_t hashes[kAtOnce];
  for (size_t start = 0; start < count; start += kAtOnce) {
    const size_t end = std::min(count, start + kAtOnce);
    for (size_t i = start; i < end; ++i) {
      const uint32_t its = hashes[i - start] = hash(key_at(keys, i));
      __builtin_prefetch(&slots_[home(its)]);
    }
    for (size_t i = start; i < end; ++i) {
      const Slot& slot = slots_[home(hashes[i - start])];
      if (slot.node == kNone) continue;
      __builtin_prefetch(&nodes[slot.node]);
      __builtin_prefetch(&nodes[slot.node].count);  // it may lie across two cache lines
    }
    for (size_t i = start; i < end; ++i) {
      found[i] = find(key_at(keys, i), hashes[i - start]);
    }
  }
}

void Table::insert(uint32_t node, const Key& key) {
  nodes[node].key = key;
  const uint32_t its = hash(key);
  uint32_t at = home(its);
  while (slots_[at].node != kNone) at = (at + 1) & mask_;
  slots_[at] = {its, node};
}

uint32_t Table::slot_of(uint32_t node) const {
  uint32_t at = home(hash(nodes[node].key));
  while (slots_[at].node != node) at = (at + 1) & mask_;
  return at;
}

void Table::erase(uint32_t node) {
  // Later slots move up if they may, so that no search ends too early.
  uint32_t hole = slot_of(node);
  for (uint32_t at = (hole + 1) & mask_; slots_[at].node != kNone; at = (at + 1) & mask_) {
    const uint32_t distance = (at - home(slots_[at].hash)) & mask_;
    if (distance < ((at - hole) & mask_)) continue;
    slots_[hole] = slots_[at];
    hole = at;
  }
  slots_[hole].node = kNone;
}

}  // namespace kvswap::prefix
