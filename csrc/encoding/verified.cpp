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

  // What is the same in every launch. tiles: address of all of a block's.
  ChecksumArguments arguments_of(const PagedCopy& copy, uint64_t tiles, uint32_t word_bytes) const {
    ChecksumArguments arguments{};
    arguments.tiles = tiles;
    arguments.first_tile = first_tiles_[copy.slabs.begin];
    arguments.tile_count = first_tiles_[copy.slabs.end] - arguments.first_tile;
    arguments.word_bytes = word_bytes;
    arguments.task = copy.to_host ? ChecksumTask::kWrite : ChecksumTask::kCompare;
    return arguments;
  }

  // Calls run(arguments) for blocks [first, last) of the copy, for as many at a time as a launch
  // has.
  template <typename Run>
  void for_each(const PagedCopy& copy, size_t first, size_t last, uint64_t tiles,
                uint32_t word_bytes, const Run& run) const {
    ChecksumArguments arguments = arguments_of(copy, tiles, word_bytes);
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
         << hex(found) << ", and " << hex(stored) << " is that of store "
         << (store & ~(kAdoptedStore | kGroupBits));
    if ((store & kAdoptedStore) != 0) text << " into another pool";
    return text.str();
  }

 private:
  const ChecksumTable table_;
  const std::vector<uint32_t> first_tiles_;
  const std::vector<uint64_t> sizes_;
};

// Checksums are made by the kernels of the slots' own table if they can, by a kernel that copies in
// their place if the slots have blocks as they are, and otherwise by one that reads the blocks once
// more.
class VerifiedTable : public PackTable {
 public:
  VerifiedTable(const Packing& packing, std::shared_ptr<PackTable> slots,
                const Checksums& checksums, const Slabs& gpu, const Slabs& host, bool is_raw,
                int device, cuda::Stream stream)
      : PackTable(packing, upload_checksum_tiles(gpu, stream)),
        slots_(std::move(slots)),
        checksums_(checksums),
        kernels_(cuda::kernels(device)),
        stage_bytes_(static_cast<uint32_t>(std::min<uint64_t>(
            kChecksumTileBytes, *std::max_element(gpu.sizes.begin(), gpu.sizes.end())))),
        word_bytes_(gpu.alignment()),
        copies_(is_raw && kernels_.checksum_copy != nullptr && word_bytes_ == 16 &&
                host.alignment() == 16) {}

  void leak() noexcept override {
    PackTable::leak();
    slots_->leak();
  }

  void pack(const PagedCopy& copy, uint64_t begin, uint64_t end, uint64_t packed,
            void* stream) const override {
    const uint64_t size = packing.packed_bytes(copy.slabs);
    if (on_its_way()) {
      if (copies_) {
        ChecksumArguments arguments = copy_arguments(copy);
        arguments.packed = packed;
        arguments.packed_stride = size;
        return copy_and_checksum(arguments, copy, begin, end, kMaxCtas, stream);
      }
      slots_->pack(with_checksums(copy), begin, end, packed, stream);
    } else {
      slots_->pack(copy, begin, end, packed, stream);
      // Each block with the piece in which it ends.
      checksum(copy, begin / size, end / size, stream);
    }
  }

  void copy_over_link(const PagedCopy& copy, void* stream) const override {
    if (on_its_way()) {
      if (!copies_) return slots_->copy_over_link(with_checksums(copy), stream);
      ChecksumArguments arguments = copy_arguments(copy);
      arguments.packed = copy.host->bases[copy.slabs.begin];
      arguments.packed_stride = copy.host->strides[copy.slabs.begin];
      arguments.by_slot = 1;
      const unsigned ctas = kBytesOverLink / (kChecksumCopyWarps * 2 * stage_bytes_);
      return copy_and_checksum(arguments, copy, 0, copy.count * arguments.block_bytes,
                               std::clamp(ctas, 1u, kMaxCtas), stream);
    }
    slots_->copy_over_link(copy, stream);
    end_copy(copy, stream);
  }

  void end_copy(const PagedCopy& copy, void* stream) const override {
    checksum(copy, 0, copy.count, stream);
  }

 private:
  bool on_its_way() const { return copies_ || slots_->makes_checksums(); }
  PagedCopy with_checksums(PagedCopy copy) const {
    copy.checksums = &checksums_.table();
    return copy;
  }

  ChecksumArguments copy_arguments(const PagedCopy& copy) const {
    ChecksumArguments arguments = checksums_.arguments_of(copy, address(), word_bytes_);
    arguments.block_bytes = packing.packed_bytes(copy.slabs);
    arguments.stage_bytes = stage_bytes_;
    return arguments;
  }
  // Bytes [begin, end). arguments.packed: of byte `begin`, or of slot 0.
  void copy_and_checksum(ChecksumArguments& arguments, const PagedCopy& copy, uint64_t begin,
                         uint64_t end, unsigned max_ctas, cuda::Stream stream) const {
    const uint64_t size = arguments.block_bytes, packed = arguments.packed;
    for (size_t first = begin / size; first * size < end; first += arguments.block_count) {
      set_bytes(arguments, copy, first, begin, end);
      arguments.states = copy.states_from(first);
      checksums_.table().set_rows(arguments, copy, first);
      if (arguments.by_slot == 0) arguments.packed = packed + first * size - begin;
      const unsigned tiles = arguments.block_count * arguments.tile_count;
      const unsigned ctas =
          std::min(max_ctas, (tiles + kChecksumCopyWarps - 1) / kChecksumCopyWarps);
      cuda::launch(kernels_.checksum_copy, ctas + 1, 32 * kChecksumCopyWarps,
                   kChecksumCopyWarps * kChecksumCopyStages * stage_bytes_, stream, arguments,
                   " of checksum_copy, ", arguments.block_count, " blocks of ",
                   arguments.tile_count, " tiles");
    }
  }

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
  const uint32_t stage_bytes_, word_bytes_;
  const bool copies_;
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
    return std::make_shared<VerifiedTable>(*this, std::move(table), checksums_, gpu, host,
                                           !slots_->can_reject(), device, stream);
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
