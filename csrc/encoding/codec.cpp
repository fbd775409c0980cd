#include "encoding/codec.h"

#include <cstring>

namespace kvswap {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "a slot is little endian");

// Values that are worked on at a time. The loops over them have a fixed number of turns and no
// branches, so that the compiler makes vector instructions of them.
constexpr uint32_t kChunk = 32;
static_assert(kTileAlignment == kChunk * sizeof(uint16_t));

template <typename Word>
Word read(const uint8_t* from) {
  Word word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

uint8_t exponent_of(uint16_t value) { return static_cast<uint8_t>(value >> 7); }

// The lowest exponent whose window has most of the sampled values, as the kernel chooses it.
uint8_t choose_lowest(const uint8_t* values, uint32_t bytes) {
  uint32_t bins[256] = {};
  for (uint32_t vector = 0; vector < bytes / 16; ++vector) {
    const auto pair = read<uint32_t>(values + 16 * vector + 4 * sampled_word(vector));
    ++bins[exponent_of(static_cast<uint16_t>(pair))];
    ++bins[exponent_of(static_cast<uint16_t>(pair >> 16))];
  }
  uint32_t inside = 0, most = 0, lowest = 1;
  for (uint32_t exponent = 1; exponent < kWindow; ++exponent) inside += bins[exponent];
  for (uint32_t from = 1; from <= kMaxLowest; ++from) {
    inside += bins[from + kWindow - 1];
    if (inside > most) most = inside, lowest = from;
    inside -= bins[from];
  }
  // This is the first of the windows with most values, so its unused exponents are the lowest ones.
  // One of them is given to larger values that were not sampled, and no more: most of those that
  // were not sampled are smaller.
  if (bins[lowest] == 0 && lowest < kMaxLowest) ++lowest;
  return static_cast<uint8_t>(lowest);
}

// 8 codes, a byte each, as the word of the slot, and the way back.
uint32_t pack_codes(uint64_t codes) {
  // Pairs of codes of values 0 and 2, 4 and 6; and in the next byte of 1 and 3, 5 and 7.
  const uint64_t pairs = (codes | codes >> 12) & 0x0000ffff0000ffff;
  const uint64_t even = pairs & 0x000000ff000000ff, odd = pairs >> 8 & 0x000000ff000000ff;
  return static_cast<uint32_t>((even | even >> 24) & 0xffff) |
         static_cast<uint32_t>((odd | odd >> 24) & 0xffff) << 16;
}

uint64_t unpack_codes(uint32_t word) {
  uint64_t pairs = (word & 0xff) | uint64_t{word & 0xff00} << 24;
  pairs |= uint64_t{word & 0xff0000} >> 8 | uint64_t{word & 0xff000000} << 16;
  return (pairs | pairs << 12) & 0x0f0f0f0f0f0f0f0f;
}

// Splits values into signs with mantissas, and codes. escapes[i]: 1 if value i is one, else 0.
// Returns whether there is any.
bool split(const uint8_t* values, uint8_t lowest, uint8_t* signs, uint8_t* codes,
           uint8_t* escapes) {
  uint16_t value[kChunk];
  std::memcpy(value, values, sizeof value);
  uint8_t any = 0;
  for (uint32_t i = 0; i < kChunk; ++i) {
    const uint8_t exponent = exponent_of(value[i]);
    const auto above = static_cast<uint8_t>(exponent - lowest);
    const uint8_t inside = above < kWindow ? 0xff : 0;
    codes[i] = static_cast<uint8_t>((above + 1) & inside);
    escapes[i] = static_cast<uint8_t>(~inside & (exponent != 0 ? 1 : 0));
    signs[i] = static_cast<uint8_t>((value[i] >> 8 & 0x80) | (value[i] & 0x7f));
    any |= escapes[i];
  }
  return any != 0;
}

// The escapes of a slot that is being encoded.
class EscapeList {
 public:
  EscapeList(uint8_t* slot, const SlotTiles& tiles)
      : places_(slot + places_offset(tiles.count)),
        exponents_(slot + exponents_offset(tiles.count, tiles.max_escapes)),
        room_(tiles.max_escapes) {}
  void add(uint32_t place, uint8_t exponent) {
    if (count_ < room_) {
      const auto at = static_cast<uint16_t>(place);
      std::memcpy(places_ + sizeof at * count_, &at, sizeof at);
      exponents_[count_] = exponent;
    }
    ++count_;
  }
  uint32_t count() const { return count_; }
  bool fits() const { return count_ <= room_; }

 private:
  uint8_t* places_;
  uint8_t* exponents_;
  uint32_t room_, count_ = 0;
};

// Returns the tile's lowest exponent.
uint8_t encode_tile(const uint8_t* values, uint32_t bytes, uint8_t* encoded, EscapeList& list) {
  const uint8_t lowest = choose_lowest(values, bytes);
  const uint32_t count = bytes / sizeof(uint16_t);
  for (uint32_t first = 0; first < count; first += kChunk) {
    uint8_t codes[kChunk], escapes[kChunk];
    const uint8_t* chunk = values + first * sizeof(uint16_t);
    const bool any = split(chunk, lowest, encoded + first, codes, escapes);
    for (uint32_t i = 0; i < kChunk; i += 8) {
      const uint32_t word = pack_codes(read<uint64_t>(codes + i));
      std::memcpy(encoded + count + (first + i) / 2, &word, sizeof word);
    }
    if (!any) continue;
    for (uint32_t i = 0; i < kChunk; ++i) {
      if (escapes[i])
        list.add(first + i, exponent_of(read<uint16_t>(chunk + i * sizeof(uint16_t))));
    }
  }
  return lowest;
}

void decode_tile(const uint8_t* encoded, uint8_t lowest, uint8_t* values, uint32_t bytes) {
  const uint32_t count = bytes / sizeof(uint16_t);
  for (uint32_t first = 0; first < count; first += kChunk) {
    uint8_t signs[kChunk], codes[kChunk];
    std::memcpy(signs, encoded + first, kChunk);
    for (uint32_t i = 0; i < kChunk; i += 8) {
      const uint64_t eight = unpack_codes(read<uint32_t>(encoded + count + (first + i) / 2));
      std::memcpy(codes + i, &eight, sizeof eight);
    }
    uint16_t value[kChunk];
    for (uint32_t i = 0; i < kChunk; ++i) {
      const auto exponent = static_cast<uint8_t>(codes[i] != 0 ? codes[i] + lowest - 1 : 0);
      value[i] = static_cast<uint16_t>((signs[i] & 0x80) << 8 | exponent << 7 | (signs[i] & 0x7f));
    }
    std::memcpy(values + first * sizeof(uint16_t), value, sizeof value);
  }
}

uint8_t* address_of(const SlotTile& tile, int64_t block) {
  return reinterpret_cast<uint8_t*>(tile.base + static_cast<uint64_t>(block) * tile.stride);
}

// What a slot's metadata says, checked whenever it is read: another process may be writing to the
// slot, so that what was valid a moment ago is not any more.
class Metadata {
 public:
  struct Escape {
    uint16_t place;
    uint8_t exponent;
  };

  Metadata(const uint8_t* slot, const SlotTiles& tiles) : slot_(slot), tiles_(tiles) {}

  bool is_slot() const {
    const auto header = read<SlotHeader>(slot_);
    return header.magic == kSlotMagic && (header.state & kSlotOverflow) == 0;
  }
  // Reads the entry of a tile. False if something in it is out of range.
  bool read_entry(uint32_t tile, SlotEntry& entry) const {
    entry = read<SlotEntry>(slot_ + kEntriesOffset + tile * sizeof(SlotEntry));
    return entry.lowest >= 1 && entry.lowest <= kMaxLowest &&
           entry.first_escape <= tiles_.max_escapes &&
           entry.escapes <= tiles_.max_escapes - entry.first_escape;
  }
  // Calls take(escape) for each escape of a tile. False if its place is out of range.
  template <typename Take>
  bool read_escapes(uint32_t tile, const SlotEntry& entry, const Take& take) const {
    const uint8_t* places = slot_ + places_offset(tiles_.count);
    const uint8_t* exponents = slot_ + exponents_offset(tiles_.count, tiles_.max_escapes);
    for (uint32_t i = entry.first_escape; i < entry.first_escape + entry.escapes; ++i) {
      const Escape escape{read<uint16_t>(places + i * sizeof(uint16_t)), exponents[i]};
      if (escape.place >= tiles_.tiles[tile].bytes / sizeof(uint16_t)) return false;
      take(escape);
    }
    return true;
  }
  // Of all tiles, whichever are decoded: a block that is copied layer group by layer group is
  // refused by the first of them.
  bool is_valid() const {
    if (!is_slot()) return false;
    for (uint32_t tile = 0; tile < tiles_.count; ++tile) {
      SlotEntry entry;
      if (!read_entry(tile, entry)) return false;
      if (!read_escapes(tile, entry, [](const Escape&) {})) return false;
    }
    return true;
  }

 private:
  const uint8_t* slot_;
  const SlotTiles& tiles_;
};

}  // namespace

SlotState encode_slot(const SlotTiles& tiles, int64_t block, uint8_t* slot) {
  EscapeList escapes(slot, tiles);
  for (uint32_t number = 0; number < tiles.count; ++number) {
    const SlotTile& tile = tiles.tiles[number];
    SlotEntry entry{};
    entry.first_escape = escapes.count();
    entry.lowest = encode_tile(address_of(tile, block), tile.bytes, slot + tile.offset, escapes);
    entry.escapes = static_cast<uint16_t>(escapes.count() - entry.first_escape);
    std::memcpy(slot + kEntriesOffset + number * sizeof entry, &entry, sizeof entry);
  }
  const SlotHeader header{kSlotMagic, escapes.count() | (escapes.fits() ? 0 : kSlotOverflow), 0};
  std::memcpy(slot, &header, sizeof header);
  return escapes.fits() ? SlotState::kGood : SlotState::kOverflow;
}

SlotState decode_slot(const SlotTiles& tiles, SlotFormat::TileRange range, const uint8_t* slot,
                      int64_t block) {
  const Metadata metadata(slot, tiles);
  if (!metadata.is_valid()) return SlotState::kRefused;
  for (uint32_t number = range.begin; number < range.end; ++number) {
    const SlotTile& tile = tiles.tiles[number];
    uint8_t* values = address_of(tile, block);
    const auto set_exponent = [values](const Metadata::Escape& escape) {
      uint8_t* at = values + escape.place * sizeof(uint16_t);
      const auto value =
          static_cast<uint16_t>((read<uint16_t>(at) & 0x807f) | escape.exponent << 7);
      std::memcpy(at, &value, sizeof value);
    };
    SlotEntry entry;
    if (!metadata.read_entry(number, entry)) return SlotState::kRefused;
    decode_tile(slot + tile.offset, entry.lowest, values, tile.bytes);
    if (!metadata.read_escapes(number, entry, set_exponent)) return SlotState::kRefused;
  }
  return SlotState::kGood;
}

}  // namespace kvswap
