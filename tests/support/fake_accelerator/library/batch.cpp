#include "batch.h"

#include <cstring>
#include <sstream>

#include "memory.h"

namespace fake_accelerator {
namespace {

// One end of a copy.
struct End {
  char* address;
  size_t bytes;
  bool on_device;
  std::shared_ptr<Pinned> pinned;

  // Where it is when the copy runs. `block` keeps it.
  char* reach(std::shared_ptr<Block>& block) const {
    if (!on_device) return pinned->check_registered(), address;
    block = find_block(address, bytes);
    if (!block) throw Failure(freed(address, bytes));
    return behind(address);
  }
};

struct Copy {
  End dst, src;
};

End end_of_copy(const char* which, int64_t index, char* address, size_t bytes, int device) {
  End end{address, bytes, device_of(address) >= 0, nullptr};
  std::ostringstream what;
  what << which << "[" << index << "]: " << bytes << " bytes at " << static_cast<void*>(address);
  if (end.on_device) {
    const auto block = find_block(address, bytes);
    if (!block) throw Failure(what.str() + " are not in one allocation of device memory");
    if (block->device != device)
      throw Failure(what.str() + " are on another device than the stream");
  } else {
    end.pinned = find_pinned(address, bytes);
    if (!end.pinned) throw Failure(what.str() + " are neither device memory nor pinned");
  }
  return end;
}

}  // namespace

void copy_batch(Device& device, StreamId stream, int64_t count, char* const* dst, char* const* src,
                const int64_t* sizes) {
  std::vector<Copy> copies;
  int64_t to_host = 0, bytes_to_host = 0, bytes_to_device = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto bytes = static_cast<size_t>(sizes[i]);
    copies.push_back({end_of_copy("dst", i, dst[i], bytes, device.index),
                      end_of_copy("src", i, src[i], bytes, device.index)});
    if (copies.back().dst.on_device == copies.back().src.on_device)
      throw Failure("copy " + std::to_string(i) + " is not between host and device");
    to_host += copies.back().src.on_device;
    (copies.back().src.on_device ? bytes_to_host : bytes_to_device) += sizes[i];
  }
  const bool fails = device.enter(Call::kBatch);
  Work work;
  work.what = "batch of " + std::to_string(count) + " copies";
  work.copies = true;
  work.run = [copies = std::move(copies)] {
    for (auto copy = copies.rbegin(); copy != copies.rend(); ++copy) {
      std::shared_ptr<Block> dst_block, src_block;
      char* dst = copy->dst.reach(dst_block);
      std::memcpy(dst, copy->src.reach(src_block), copy->dst.bytes);
    }
  };
  device.submit(stream, std::move(work), fails);
  device.count([=](Counters& counters) {
    counters.copies_to_host += to_host;
    counters.copies_to_device += count - to_host;
    counters.bytes_to_host += bytes_to_host;
    counters.bytes_to_device += bytes_to_device;
  });
}

}  // namespace fake_accelerator
