#pragma once

#include <cstdint>

// The bulk copies of Hopper and later, between global and shared memory, for the kernels. Read by
// nvcc only. One thread calls them for all bytes of a copy; addresses and sizes are multiples
// of 16.
namespace kvswap {

__device__ inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

#if __CUDA_ARCH__ >= 900
// A barrier in shared memory that one load at a time completes. After the last init_barrier() the
// thread calls publish_barriers().
__device__ inline void init_barrier(unsigned barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier));
}
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Begins a load of so many bytes, which load_part() starts to copy to shared memory.
__device__ inline void begin_load(unsigned bytes, unsigned barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ inline void load_part(unsigned to, uint64_t from, unsigned bytes, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
__device__ inline void load_bulk(unsigned to, uint64_t from, unsigned bytes, unsigned barrier) {
  begin_load(bytes, barrier);
  load_part(to, from, bytes, barrier);
}
// Waits for a load of this barrier; any thread. parity: 0 for the first load, 1 for the second one,
// then 0 again.
__device__ inline void wait_for_load(unsigned barrier, unsigned parity) {
  unsigned done = 0;
  while (done == 0) {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

// Starts to copy from shared memory. commit_stores() makes a group of the stores before it.
__device__ inline void store_bulk(uint64_t to, unsigned from, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all but the last kGroups groups have left shared memory.
template <int kGroups>
__device__ void wait_for_reads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}
// Waits until all stores have arrived.
__device__ inline void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
#endif

}  // namespace kvswap
