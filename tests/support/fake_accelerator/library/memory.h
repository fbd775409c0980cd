// Memory of the devices, which the host cannot read, and pinned memory of the host. Knows neither
// PyTorch nor streams.
//
// The address of device memory lies where the process may neither read nor write. The accelerator
// itself reaches the memory at a constant distance behind it. An address is never used a second
// time: what uses memory that was freed is found out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace fake_accelerator {

// Memory of a device. Freed with its last owner.
struct Block {
  Block(int device, char* address, size_t bytes) : device(device), address(address), bytes(bytes) {}
  ~Block();

  const int device;
  char* const address;
  const size_t bytes;
  std::vector<std::pair<int, int64_t>> streams;  // devices and streams that use it
};

struct Usage {
  int64_t blocks, bytes;
};

// New memory, full of 0xCD; nullptr if the device has no more.
std::shared_ptr<Block> allocate(int device, size_t bytes);

// The block in which these bytes are; nullptr if there is none.
std::shared_ptr<Block> find_block(const void* address, size_t bytes);

// What is said of an operation that finds no block where there was one.
std::string freed(const void* address, size_t bytes);

// Where the accelerator reads and writes device memory.
char* behind(void* address);

// The device whose memory is here, or -1.
int device_of(const void* address);

Usage memory_usage(int device);

// Memory of the host that copies can use while the program goes on.
struct Pinned {
  Pinned(char* address, size_t bytes) : address(address), bytes(bytes) {}
  ~Pinned();

  char* const address;
  const size_t bytes;
};

// New pinned memory, full of 0xCD.
std::shared_ptr<Pinned> allocate_pinned(size_t bytes);

// The pinned memory in which these bytes are; nullptr if there is none.
std::shared_ptr<Pinned> find_pinned(const void* address, size_t bytes);

std::mutex& memory_lock();  // taken after the devices' lock, never before it

}  // namespace fake_accelerator
