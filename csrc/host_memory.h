#pragma once

#include <cstdint>
#include <vector>

// Host memory of a pool: mapping, NUMA binding, touching. Knows no CUDA.
namespace kvswap {

// Maps `bytes`, a multiple of the system's page: a file, shared, or with fd -1 private zeros.
// Private pages are wiped in a fork, so that none is copied when the parent writes to it. A guard
// page follows, which also keeps the kernel from merging the mapping with another one.
// Begins where a transparent huge page can, and asks for these. Throws if the kernel refuses.
void* map_host(int fd, uint64_t bytes);
void unmap_host(void* address, uint64_t bytes);

// Pages touched from now on come from this NUMA node while it has free ones. False if the kernel
// has no such call or a container forbids it.
bool bind_host(void* address, uint64_t bytes, int node);

// How pages are touched.
struct Touch {
  int threads;
  bool collapse;          // make huge pages out of small ones
  std::vector<int> cpus;  // for the threads; none: any
};

// Allocates all pages without changing their contents. Throws if there is no memory.
void touch_host(void* address, uint64_t bytes, const Touch& how);

}  // namespace kvswap
