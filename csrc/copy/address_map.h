#pragma once

#include <cstdint>
#include <string>
#include <vector>

// What the CUDA driver knows about an address.
namespace kvswap {

// kPinned: host memory that the device uses at the same address. Registered memory that it has at
// another one, as under WSL2, counts as kPageable: the driver copies it, and nothing else does.
enum class MemoryKind { kPageable, kPinned, kDevice };

struct Memory {
  MemoryKind kind = MemoryKind::kPageable;
  int device = -1;  // of device memory; -1 for host memory
  // The allocation, reservation or registration that contains the address; both 0 if the driver
  // does not know the address. Of memory that the device has elsewhere the address alone: no copy
  // is merged there.
  uint64_t begin = 0;
  uint64_t end = 0;

  bool on_device() const { return kind == MemoryKind::kDevice; }
};

// Asks the driver about addresses, once for each allocation and not for each fragment. To be used
// within one call only: allocations come and go between calls.
class AddressMap {
 public:
  AddressMap();

  // An address that the driver does not know, or any address while CUDA is not initialised in this
  // process, is pageable host memory.
  Memory find(uint64_t address);

  // The end of the mapped memory that contains an address known to the driver. Reservations
  // (expandable segments) are mapped in pieces; in a gap this returns `address`. Always asks the
  // driver.
  uint64_t mapped_until(uint64_t address) const;

  // "0x7f00 (device 0, allocation 0x7f00 + 4096 bytes)", for errors.
  std::string describe(uint64_t address);

 private:
  Memory query(uint64_t address) const;

  bool cuda_in_use_;
  std::vector<Memory> seen_;  // sorted by begin
};

// "0x7f00".
std::string hex(uint64_t address);

}  // namespace kvswap
