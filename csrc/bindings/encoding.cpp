#include <cstring>
#include <vector>

#include "bindings/python.h"
#include "encoding/checksum.h"
#include "encoding/codec.h"
#include "encoding/slot_format.h"

// How slots keep blocks, and lossless encoding of bf16 values by the CPU.
// sizes: bytes of a block in each slab; bases: where they are in host memory. The codec
// releases the GIL.
namespace kvswap::bindings {
namespace {

Slabs slabs_at(nb::handle bases) {
  Slabs slabs;
  slabs.bases = read_numbers<uint64_t>(bases);
  slabs.strides.resize(slabs.bases.size());
  return slabs;
}

// A block in host memory, and what its slot has.
struct HostBlock {
  SlotFormat format;
  std::vector<SlotTile> tiles;

  HostBlock(nb::handle bases, nb::handle sizes)
      : format(read_numbers<uint64_t>(sizes)), tiles(tiles_in(slabs_at(bases), format.tiles())) {}
  SlotTiles slot_tiles() const { return {tiles.data(), format.tile_count(), format.max_escapes()}; }
};

}  // namespace

void bind_encoding(nb::module_& module) {
  nb::class_<PyEncoding>(module, "Encoding", "How slots of host pages keep blocks of some sizes.")
      .def_prop_ro("slot_bytes",
                   [](const PyEncoding& self) { return self.encoding->slot_bytes(); });
  module.def(
      "raw_encoding",
      [](nb::handle sizes) { return PyEncoding{make_raw_encoding(read_numbers<uint64_t>(sizes))}; },
      "sizes"_a);
  module.def(
      "lossless_encoding",
      [](nb::handle sizes) {
        return PyEncoding{make_lossless_encoding(read_numbers<uint64_t>(sizes))};
      },
      "sizes"_a);
  nb::class_<ChecksumTable>(module, "ChecksumTable",
                            "The checksums of the slots of a pool; sizes: of their blocks.")
      .def(nb::init<uint64_t, uint64_t, uint64_t, uint64_t, uint64_t>(), "counter"_a, "rows"_a,
           "row_stride"_a, "row_bytes"_a, "group"_a)
      .def(
          "read",
          [](const ChecksumTable& self, nb::handle sizes, int64_t first_slot, int64_t slots) {
            std::vector<uint64_t> checksums(
                first_checksum_tiles(read_numbers<uint64_t>(sizes)).back());
            std::vector<uint64_t> all;
            for (int64_t slot = first_slot; slot < first_slot + slots; ++slot) {
              all.push_back(self.read(slot, checksums));
              all.insert(all.end(), checksums.begin(), checksums.end());
            }
            return nb::bytes(all.data(), all.size() * sizeof(uint64_t));
          },
          "sizes"_a, "first_slot"_a, "slots"_a,
          "For each slot 1, or 0 if it has no block of the group, and the checksums of the block's "
          "tiles.")
      .def(
          "write",
          [](const ChecksumTable& self, int64_t first_slot, int64_t slots, nb::bytes read) {
            std::vector<uint64_t> all(read.size() / sizeof(uint64_t));
            std::memcpy(all.data(), read.c_str(), all.size() * sizeof(uint64_t));
            const auto count = static_cast<int64_t>(all.size()) / slots;  // of a slot
            for (int64_t i = 0; i < slots; ++i) {
              const auto of_slot = all.begin() + i * count;
              const int64_t checksums = *of_slot == 1 ? count - 1 : 0;
              self.write(first_slot + i, {of_slot + 1, of_slot + 1 + checksums});
            }
          },
          "first_slot"_a, "slots"_a, "checksums"_a,
          "Binds what read() has returned for other slots to these ones.")
      .def("adopt", &ChecksumTable::adopt, "slot"_a,
           "Binds checksums that have come with their block to this slot.");
  module.def(
      "verified_encoding",
      [](const PyEncoding& slots, nb::handle sizes, const ChecksumTable& table) {
        return PyEncoding{
            make_verified_encoding(slots.encoding, read_numbers<uint64_t>(sizes), table)};
      },
      "slots"_a, "sizes"_a, "table"_a);
  module.def(
      "checksum_row_bytes",
      [](nb::handle sizes) { return checksum_row_bytes(read_numbers<uint64_t>(sizes)); }, "sizes"_a,
      "Bytes of a row of a ChecksumTable.");

  module.def(
      "encode_block",
      [](nb::handle bases, nb::handle sizes, uintptr_t slot) {
        const HostBlock block(bases, sizes);
        auto* into = reinterpret_cast<uint8_t*>(slot);
        return without_gil(
            [&] { return static_cast<int>(encode_slot(block.slot_tiles(), 0, into)); });
      },
      "bases"_a, "sizes"_a, "slot"_a,
      "Returns 0; 1 if the block does not fit into the slot, which then holds none.");
  module.def(
      "decode_block",
      [](nb::handle bases, nb::handle sizes, uintptr_t slot, size_t first_slab, size_t end_slab) {
        const HostBlock block(bases, sizes);
        const auto range = block.format.tiles_of({first_slab, end_slab});
        const auto* from = reinterpret_cast<const uint8_t*>(slot);
        return without_gil(
            [&] { return static_cast<int>(decode_slot(block.slot_tiles(), range, from, 0)); });
      },
      "bases"_a, "sizes"_a, "slot"_a, "first_slab"_a, "end_slab"_a,
      "Decodes the slabs from first_slab to end_slab - 1. Returns 0; 2 if the slot holds no block, "
      "and nothing was written.");
}

}  // namespace kvswap::bindings
