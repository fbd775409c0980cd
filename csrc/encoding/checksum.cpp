#include "encoding/checksum.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "check.h"
#include "kernels/slot.h"

namespace kvswap {
namespace {

constexpr uint64_t kRowAlignment = 64;  // what the kernel reads and writes at once

std::array<uint32_t, kChecksumKeys> make_keys() {
  std::array<uint32_t, kChecksumKeys> keys;
  for (uint32_t i = 0; i < kChecksumKeys; ++i) keys[i] = checksum_key(i);
  return keys;
}

uint32_t word_at(const uint8_t* bytes, uint32_t number) {
  uint32_t word;
  std::memcpy(&word, bytes + number * sizeof word, sizeof word);
  return word;
}

// A fixed number of turns without branches, so that the compiler makes vector instructions of them.
void add_unit(const uint8_t* unit, const uint32_t* keys, ChecksumSums& sums) {
  constexpr uint32_t kHalf = kChecksumUnitWords / 2;
  uint64_t first = 0, second = 0;
  for (uint32_t i = 0; i < kHalf; ++i) {
    const uint32_t a = word_at(unit, i), b = word_at(unit, kHalf + i);
    first += uint64_t{a + keys[i]} * (b + keys[kHalf + i]);
    second +=
        uint64_t{a + keys[kChecksumUnitWords + i]} * (b + keys[kChecksumUnitWords + kHalf + i]);
  }
  sums.first += first;
  sums.second += second;
}

uint64_t checksum_of_tile(const uint8_t* bytes, uint64_t size, uint32_t tile) {
  static const std::array<uint32_t, kChecksumKeys> keys = make_keys();
  ChecksumSums sums;
  for (uint64_t at = 0; at < size; at += kChecksumUnitBytes) {
    const uint32_t* key = keys.data() + at / sizeof(uint32_t);
    if (size - at >= kChecksumUnitBytes) {
      add_unit(bytes + at, key, sums);
    } else {
      uint8_t last[kChecksumUnitBytes] = {};
      std::memcpy(last, bytes + at, size - at);
      add_unit(last, key, sums);
    }
  }
  return checksum_of(sums, tile);
}

}  // namespace

std::vector<uint32_t> first_checksum_tiles(const std::vector<uint64_t>& sizes) {
  std::vector<uint32_t> first{0};
  for (const uint64_t size : sizes) {
    first.push_back(first.back() + checksum_tiles(size));
  }
  return first;
}

std::vector<ChecksumTile> checksum_tiles_in(const Slabs& slabs) {
  std::vector<ChecksumTile> tiles;
  for (size_t slab = 0; slab < slabs.count(); ++slab) {
    for (uint64_t at = 0; at < slabs.sizes[slab]; at += kChecksumTileBytes) {
      const uint64_t bytes = std::min<uint64_t>(slabs.sizes[slab] - at, kChecksumTileBytes);
      tiles.push_back({slabs.bases[slab] + at, slabs.strides[slab], bytes});
    }
  }
  return tiles;
}

uint64_t checksum_row_bytes(const std::vector<uint64_t>& sizes) {
  const uint64_t bytes =
      sizeof(SlotChecksums) + first_checksum_tiles(sizes).back() * sizeof(uint64_t);
  return (bytes + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
}

ChecksumTable::ChecksumTable(uint64_t counter, uint64_t rows, uint64_t row_stride,
                             uint64_t row_bytes, uint64_t group)
    : counter_(counter),
      rows_(rows),
      row_stride_(row_stride),
      row_bytes_(row_bytes),
      group_(group) {
  KVSWAP_CHECK(group < kMaxGroups, "checksums know ", kMaxGroups, " groups of layers at most");
}

uint64_t ChecksumTable::begin_store(SlotChecksums& row) const {
  auto* const used = reinterpret_cast<uint64_t*>(counter_);
  const uint64_t store = __atomic_add_fetch(used, 1, __ATOMIC_RELAXED) | group_ << kGroupShift;
  write_number(row.store, store);
  return store;
}

uint64_t ChecksumTable::stored_in(const SlotChecksums& row) const {
  const uint64_t store = read_number(row.store);
  return store == 0 ? 0 : (store & ~kGroupBits) | group_ << kGroupShift;
}

bool ChecksumTable::read(int64_t slot, std::vector<uint64_t>& checksums) const {
  const SlotChecksums& row = at(slot);
  const uint64_t tag = checksum_tag(static_cast<uint64_t>(slot), row.store);
  for (size_t tile = 0; tile < checksums.size(); ++tile)
    checksums[tile] = checksum(slot, tile) ^ tag;
  return has_block(slot) && group_of(row.store) == group_;
}

void ChecksumTable::write(int64_t slot, const std::vector<uint64_t>& checksums) const {
  SlotChecksums& row = at(slot);
  if (checksums.empty()) {
    write_number(row.store, 0);  // whatever group loads it
    row.tag = 0;
    return;
  }
  const uint64_t tag = checksum_tag(static_cast<uint64_t>(slot), begin_store(row));
  for (size_t tile = 0; tile < checksums.size(); ++tile) {
    write_number(checksums_behind(&row)[tile], checksums[tile] ^ tag);
  }
  row.tag = tag;
}

bool ChecksumTable::has_block(int64_t slot) const {
  const SlotChecksums& row = at(slot);
  return row.store != 0 && row.tag == checksum_tag(static_cast<uint64_t>(slot), row.store);
}

void ChecksumTable::adopt(int64_t slot) const {
  SlotChecksums& row = at(slot);
  const uint64_t store = row.store | kAdoptedStore;
  const uint64_t tag = checksum_tag(static_cast<uint64_t>(slot), store);
  const size_t tiles = (row_bytes_ - sizeof(SlotChecksums)) / sizeof(uint64_t);
  for (size_t tile = 0; tile < tiles; ++tile) checksums_behind(&row)[tile] ^= row.tag ^ tag;
  row.store = store;
  row.tag = tag;
}

void ChecksumTable::number_stores(const PagedCopy& copy) const {
  for (size_t i = 0; i < copy.count; ++i) {
    if (copy.stores[i] != kUnknownStore) continue;
    SlotChecksums& row = at(copy.slots[i]);
    copy.stores[i] = copy.to_host ? begin_store(row) : stored_in(row);
  }
}

void ChecksumTable::set_rows(ChecksumArguments& arguments, const PagedCopy& copy,
                             size_t first) const {
  std::copy_n(copy.stores + first, arguments.block_count, arguments.stores);
  arguments.rows = rows_;
  arguments.row_stride = row_stride_;
}

void checksum_block(const ChecksumArguments& a, uint32_t i) {
  SlotChecksums* const row = checksums_at(a.rows, a.row_stride, a.slots[i]);
  uint64_t* const checksums = checksums_behind(row);
  uint8_t& state = reinterpret_cast<uint8_t*>(a.states)[i];
  const uint64_t tag = checksum_tag(a.slots[i], a.stores[i]);
  const bool was_rejected = state == static_cast<uint8_t>(SlotState::kOverflow) ||
                            state == static_cast<uint8_t>(SlotState::kRefused);
  if (a.task == ChecksumTask::kCompare && (a.stores[i] == 0 || row->tag == ~tag)) {
    state = static_cast<uint8_t>(SlotState::kRefused);
    return;
  }
  bool is_bad = a.task == ChecksumTask::kCompare && (was_rejected || row->tag != tag);
  if (is_bad) write_number(row->tile, kNoTile);
  for (uint32_t number = a.first_tile; number < a.first_tile + a.tile_count; ++number) {
    const ChecksumTile& tile = reinterpret_cast<const ChecksumTile*>(a.tiles)[number];
    const uint64_t address = tile.base + static_cast<uint64_t>(a.blocks[i]) * tile.stride;
    const uint64_t checksum =
        checksum_of_tile(reinterpret_cast<const uint8_t*>(address), tile.bytes, number);
    if (a.task == ChecksumTask::kWrite) {
      write_number(checksums[number], checksum ^ tag);
      continue;
    }
    const bool is_different = checksum != (checksums[number] ^ tag);
    if (is_different) {
      write_number(row->tile, number);
      write_number(row->found, checksum);
    }
    is_bad |= is_different;
  }
  if (a.task == ChecksumTask::kWrite) {
    write_number(row->tag, was_rejected ? ~tag : tag);
  } else if (is_bad) {
    state = static_cast<uint8_t>(SlotState::kCorrupted);
  }
}

}  // namespace kvswap
