#include <algorithm>
#include <sstream>
#include <utility>

#include "check.h"
#include "copy/address_map.h"
#include "cuda/context.h"
#include "encoding/checksum.h"
#include "encoding/encoding.h"
#include "kernels/kernels.h"

namespace kvswap {
namespace {

constexpr unsigned kMaxCtas = 128;  // of tiles in a launch: see kOnDevice of raw.cpp

uint64_t upload_checksum_tiles(const Slabs& gpu, cuda::Stream stream) {
  const std::vector<ChecksumTile> tiles = checksum_tiles_in(gpu);
  return cuda::upload(tiles.data(), tiles.size() * sizeof(ChecksumTile), stream,
                      "the table of checksums");
}

// The checksums of a group's blocks.
class Checksums {
 public:
  Checksums(const std::vector<uint64_t>& sizes, const ChecksumTable& table)
      : table_(table), first_tiles_(first_checksum_tiles(sizes)), sizes_(sizes) {}

  const ChecksumTable& table() const { return table_; }

  // Calls run(arguments) for blocks [first, last) of the copy, for as many at a time as a launch
  // has. tiles: address of all of a block's.
  template <typename Run>
  void for_each(const PagedCopy& copy, size_t first, size_t last, uint64_t tiles,
                uint32_t word_bytes, const Run& run) const {
    ChecksumArguments arguments{};
    arguments.tiles = tiles;
    arguments.first_tile = first_tiles_[copy.slabs.begin];
    arguments.tile_count = first_tiles_[copy.slabs.end] - arguments.first_tile;
    arguments.word_bytes = word_bytes;
    arguments.task = copy.to_host ? ChecksumTask::kWrite : ChecksumTask::kCompare;
    for (; first < last; first += arguments.block_count) {
      set_blocks(arguments, copy, first, last);
      arguments.states = copy.states_from(first);
      table_.set_rows(arguments, copy, first);
      run(arguments);
    }
  }

  // As the row is now: a later store into the slot may have written it meanwhile.
  std::string difference_in(int64_t slot) const {
    const SlotChecksums& row = table_.at(slot);
    const uint64_t found = read_number(row.found), store = read_number(row.store);
    if (group_of(store) != table_.group()) {
      return ": the slot has a block of group " + std::to_string(group_of(store));
    }
    const uint64_t right = checksum_tag(static_cast<uint64_t>(slot), store),
                   tag = read_number(row.tag);
    if (tag != right && tag != ~right) return ": the slot is marked as one of another store";
    const uint64_t tile = read_number(row.tile);
    if (tile >= first_tiles_.back()) return "";  // or another process has written it
    const auto next = std::upper_bound(first_tiles_.begin(), first_tiles_.end(), tile);
    const size_t slab = next - first_tiles_.begin() - 1;
    const uint64_t begin = (tile - first_tiles_[slab]) * kChecksumTileBytes;
    const uint64_t end = std::min<uint64_t>(begin + kChecksumTileBytes, sizes_[slab]);
    const uint64_t stored = table_.checksum(slot, tile) ^ right;
    if (found == stored) return ": it was stored again while it was loaded";
    std::ostringstream text;
    text << ": bytes " << begin << " to " << end - 1 << " of slab " << slab << " have the checksum "
         << hex(found) << " instead of " << hex(stored);
    return text.str();
  }

 private:
  const ChecksumTable table_;
  const std::vector<uint32_t> first_tiles_;
  const std::vector<uint64_t> sizes_;
};

// Copies by the slots' own table. Behind each copy a kernel reads the blocks on the GPU. If a store
// has copied other bytes than it reads, the next load does not match.
class VerifiedTable : public PackTable {
 public:
  VerifiedTable(const Packing& packing, std::shared_ptr<PackTable> slots,
                const Checksums& checksums, const Slabs& gpu, int device, cuda::Stream stream)
      : PackTable(packing, upload_checksum_tiles(gpu, stream)),
        slots_(std::move(slots)),
        checksums_(checksums),
        kernels_(cuda::kernels(device)),
        word_bytes_(gpu.alignment()) {}

  void leak() noexcept override {
    PackTable::leak();
    slots_->leak();
  }

  void begin_copy(const PagedCopy& copy) const override { checksums_.table().number_stores(copy); }

  void pack(const PagedCopy& copy, uint64_t begin, uint64_t end, uint64_t packed,
            void* stream) const override {
    const uint64_t size = packing.packed_bytes(copy.slabs);
    slots_->pack(copy, begin, end, packed, stream);
    // Each block with the piece in which it ends.
    checksum(copy, begin / size, end / size, stream);
  }

  void copy_over_link(const PagedCopy& copy, void* stream) const override {
    slots_->copy_over_link(copy, stream);
    end_copy(copy, stream);
  }

  void end_copy(const PagedCopy& copy, void* stream) const override {
    checksum(copy, 0, copy.count, stream);
  }

 private:
  void checksum(const PagedCopy& copy, size_t first, size_t last, cuda::Stream stream) const {
    checksums_.for_each(copy, first, last, address(), word_bytes_, [&](auto& arguments) {
      const unsigned groups = (arguments.tile_count + kChecksumWarps - 1) / kChecksumWarps;
      const unsigned ctas = std::min(kMaxCtas, arguments.block_count * groups);
      cuda::launch(kernels_.checksum, ctas + 1, 32 * kChecksumWarps, 0, stream, arguments,
                   " of checksum, ", arguments.block_count, " blocks of ", arguments.tile_count,
                   " tiles");
    });
  }

  const std::shared_ptr<PackTable> slots_;
  const Checksums& checksums_;
  const cuda::Kernels& kernels_;
  const uint32_t word_bytes_;
};

class VerifiedEncoding : public Encoding {
 public:
  VerifiedEncoding(std::shared_ptr<const Encoding> slots, const std::vector<uint64_t>& sizes,
                   const ChecksumTable& table)
      : slots_(std::move(slots)), checksums_(sizes, table) {}

  uint64_t slot_bytes() const override { return slots_->slot_bytes(); }
  uint64_t packed_bytes(SlabRange slabs) const override { return slots_->packed_bytes(slabs); }
  bool is_divisible() const override { return slots_->is_divisible(); }
  FragmentList page_fragments(const PagedCopy& copy, uint64_t begin, uint64_t end,
                              uint64_t packed) const override {
    return slots_->page_fragments(copy, begin, end, packed);
  }

  bool can_use(CopyMethod method) const override {
    return method != CopyMethod::kBatch && slots_->can_use(method);
  }
  const Demand* demand() const override {
    return slots_->demand() != nullptr ? slots_->demand() : &demand_;
  }

  bool packs_in_order() const override { return true; }
  bool can_reject() const override { return true; }
  const Rejection& rejection(SlotState state, bool is_store) const override {
    if (state == SlotState::kCorrupted) return corrupted_;
    return slots_->can_reject() ? slots_->rejection(state, is_store) : missing_;
  }
  std::string difference_in(int64_t slot) const override { return checksums_.difference_in(slot); }

  // Block after block, so that each is still in the CPU's caches when it is checksummed.
  void copy_on_host(const PagedCopy& copy) const override {
    const std::vector<ChecksumTile> tiles = checksum_tiles_in(*copy.gpu);
    checksums_.table().number_stores(copy);
    PagedCopy one = copy;
    for (one.count = 1; one.blocks != copy.blocks + copy.count;
         ++one.blocks, ++one.slots, ++one.states, ++one.stores) {
      slots_->copy_on_host(one);
      checksums_.for_each(one, 0, 1, reinterpret_cast<uint64_t>(tiles.data()), 1,
                          [](const ChecksumArguments& arguments) { checksum_block(arguments, 0); });
    }
  }

  std::shared_ptr<PackTable> make_table(const Slabs& gpu, const Slabs& host, int64_t num_blocks,
                                        int64_t num_slots, int device,
                                        void* stream) const override {
    std::shared_ptr<PackTable> table =
        slots_->make_table(gpu, host, num_blocks, num_slots, device, stream);
    KVSWAP_CHECK(table != nullptr, "the kernels cannot copy between this cache and its pages");
    return std::make_shared<VerifiedTable>(*this, std::move(table), checksums_, gpu, device,
                                           stream);
  }

 private:
  const std::shared_ptr<const Encoding> slots_;
  const Checksums checksums_;
  const Demand demand_{"verify='load'", "make the checksums", "verify='off'"};
  const Rejection missing_{"is not in its host page", "are not in their host pages",
                           ": no store has left one there", ": no stores have left them there",
                           "some blocks are not in their host pages"};
  const Rejection corrupted_{"is not what was stored", "are not what was stored", "", "",
                             "some blocks are not what was stored"};
};

}  // namespace

std::shared_ptr<const Encoding> make_verified_encoding(std::shared_ptr<const Encoding> slots,
                                                       const std::vector<uint64_t>& sizes,
                                                       const ChecksumTable& table) {
  const uint64_t needed = checksum_row_bytes(sizes);
  if (needed > table.row_bytes()) {
    fail<ValueError>("the checksums of a block take ", needed, " bytes, and the pool has room for ",
                     table.row_bytes(),
                     ": it was made from a layout with fewer or smaller slabs; make the pool from "
                     "the layout with the most checksums, or with verify='off'");
  }
  return std::make_shared<VerifiedEncoding>(std::move(slots), sizes, table);
}

}  // namespace kvswap
