#include "memory.h"

#include <sys/mman.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <new>
#include <sstream>

#include "device.h"

namespace fake_accelerator {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kSpan = size_t{1}
                         << 38;  // addresses of a device, and how far behind its memory is
constexpr int kFresh = 0xCD;     // memory that nobody has written

// Addresses without memory, or nullptr. Only mapped anew do they join their neighbours: the kernel
// would keep a range apart whose memory was used and then protected, and it allows 65,530 ranges.
void* map_without_access(void* address, size_t bytes, int flags) {
  flags |= MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* mapped = mmap(address, bytes, PROT_NONE, flags, -1, 0);
  return mapped == MAP_FAILED ? nullptr : mapped;
}

// All memory, under the lock. Freed tensors use it until the process ends, so nothing destroys it.
struct Memory {
  std::array<char*, kDevices> begins;
  std::array<size_t, kDevices> used = {};  // addresses, also of what was freed
  std::array<Usage, kDevices> usage = {};
  std::map<const char*, std::weak_ptr<Block>> blocks;
  std::map<const char*, std::weak_ptr<Pinned>> pinned;

  Memory() {
    for (char*& begin : begins) {
      begin = static_cast<char*>(map_without_access(nullptr, 2 * kSpan, 0));
      if (!begin) throw std::bad_alloc();
    }
  }
};

Memory& memory() {
  static auto* all = new Memory;
  return *all;
}

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// The entry of a map by addresses in which these bytes are, or nullptr.
template <class Entry>
std::shared_ptr<Entry> find(const std::map<const char*, std::weak_ptr<Entry>>& entries,
                            const void* address, size_t bytes) {
  const auto* first = static_cast<const char*>(address);
  std::shared_ptr<Entry> found;
  {
    std::lock_guard<std::mutex> lock(memory_lock());
    const auto next = entries.upper_bound(first);
    if (next != entries.begin()) found = std::prev(next)->second.lock();
  }  // if this is now the last owner, its destructor takes the lock
  return found && first + bytes <= found->address + found->bytes ? found : nullptr;
}

}  // namespace

std::mutex& memory_lock() {
  static auto* lock = new std::mutex;
  return *lock;
}

std::shared_ptr<Block> allocate(int device, size_t bytes) {
  const size_t size = whole_pages(bytes);
  std::lock_guard<std::mutex> lock(memory_lock());
  size_t& used = memory().used[device];
  if (size + kPage > kSpan - used) return nullptr;
  char* address = memory().begins[device] + used;
  char* reached = behind(address);
  if (mprotect(reached, size, PROT_READ | PROT_WRITE)) return nullptr;
  used += size + kPage;  // so that blocks do not touch
  std::memset(reached, kFresh, size);
  auto block = std::make_shared<Block>(device, address, bytes);
  memory().blocks[address] = block;
  memory().usage[device].blocks += 1;
  memory().usage[device].bytes += static_cast<int64_t>(bytes);
  return block;
}

Block::~Block() {
  std::lock_guard<std::mutex> lock(memory_lock());
  if (!map_without_access(behind(address), whole_pages(bytes), MAP_FIXED)) std::abort();
  memory().blocks.erase(address);
  memory().usage[device].blocks -= 1;
  memory().usage[device].bytes -= static_cast<int64_t>(bytes);
}

std::shared_ptr<Block> find_block(const void* address, size_t bytes) {
  return find(memory().blocks, address, bytes);
}

std::string freed(const void* address, size_t bytes) {
  std::ostringstream text;
  text << "it uses " << bytes << " bytes at " << address
       << ", which were freed. The stream was not recorded for this memory, or a wait for the "
          "operation is missing";
  return text.str();
}

char* behind(void* address) { return static_cast<char*>(address) + kSpan; }

int device_of(const void* address) {
  const auto* byte = static_cast<const char*>(address);
  for (int device = 0; device < kDevices; ++device) {
    const char* begin = memory().begins[device];
    if (byte >= begin && byte < begin + kSpan) return device;
  }
  return -1;
}

Usage memory_usage(int device) {
  std::lock_guard<std::mutex> lock(memory_lock());
  return memory().usage[device];
}

Pinned::~Pinned() {
  {
    std::lock_guard<std::mutex> lock(memory_lock());
    memory().pinned.erase(address);
  }
  std::free(address);
}

std::shared_ptr<Pinned> allocate_pinned(size_t bytes) {
  const size_t size = whole_pages(bytes);
  auto* address = static_cast<char*>(std::aligned_alloc(kPage, size));
  if (!address) throw std::bad_alloc();
  std::memset(address, kFresh, size);
  auto pinned = std::make_shared<Pinned>(address, bytes);
  std::lock_guard<std::mutex> lock(memory_lock());
  memory().pinned[address] = pinned;
  return pinned;
}

std::shared_ptr<Pinned> find_pinned(const void* address, size_t bytes) {
  return find(memory().pinned, address, bytes);
}

}  // namespace fake_accelerator
