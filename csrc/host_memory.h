#pragma once

#include <cstdint>

// Host memory of a pool: mapped, put on a NUMA node and touched. Nothing here knows CUDA.
namespace kvswap {

// Maps `bytes`, a multiple of the system's page, at a multiple of `alignment`: a file, shared; or
// with fd -1 private zeros, which a fork finds wiped, so that no page is copied when the parent
// writes to it. A page that nobody may touch follows, which also keeps the kernel from joining the
// mapping with another one. transparent: asks for huge pages. Throws what the kernel refuses.
void* map_host(int fd, uint64_t bytes, uint64_t alignment, bool transparent);
void unmap_host(void* address, uint64_t bytes);

// Pages that are touched from now on come from this NUMA node while it has some. False where the
// kernel has no such call or a container forbids it.
bool bind_host(void* address, uint64_t bytes, int node);

// How pages are touched.
struct Touch {
  int threads;
  bool collapse;        // make huge pages of what the kernel gives small pages for
  const int32_t* cpus;  // on which the threads run; none: anywhere
  int cpu_count;
};

// Gives memory to all pages without changing what is in them. Throws when there is none.
void touch_host(void* address, uint64_t bytes, const Touch& how);

}  // namespace kvswap
