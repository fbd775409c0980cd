#include "host_memory.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

#include "check.h"

namespace kvswap {
namespace {

// Headers of an older system lack some of these.
constexpr int kWipeOnFork = 18, kPopulateWrite = 23, kCollapse = 25;
constexpr long kPreferredNode = 1;
constexpr uint64_t kHugePage = 2 << 20, kStripe = 32 << 20;

uint64_t page_size() { return static_cast<uint64_t>(sysconf(_SC_PAGESIZE)); }
uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

// A write that changes nothing, also while other threads write there.
void touch_byte(uint64_t address) {
  __atomic_fetch_or(reinterpret_cast<char*>(address), 0, __ATOMIC_RELAXED);
}

// Returns 0, or why there is no memory.
int populate(uint64_t begin, uint64_t end) {
  if (madvise(reinterpret_cast<void*>(begin), end - begin, kPopulateWrite) == 0) return 0;
  if (errno != EINVAL) return errno;
  for (uint64_t at = begin; at < end; at += page_size()) touch_byte(at);  // before Linux 5.14
  return 0;
}

// Stops where there is no memory, which populate() reports.
void collapse(uint64_t begin, uint64_t end, std::atomic<bool>& wanted) {
  for (uint64_t at = round_up(begin, kHugePage); at + kHugePage <= end; at += kHugePage) {
    if (!wanted.load(std::memory_order_relaxed)) return;
    // A huge page is made around a page that is there. If the attempt fails, the next ones would
    // too, and each looks for free memory for milliseconds.
    if (populate(at, at + page_size()) != 0 ||
        madvise(reinterpret_cast<void*>(at), kHugePage, kCollapse) != 0) {
      wanted.store(false);
    }
  }
}

void run_on(const std::vector<int>& cpus) {
  if (cpus.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) {
    if (cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  }
  sched_setaffinity(0, sizeof(set), &set);  // where that is forbidden, other CPUs will do
}

}  // namespace

void* map_host(int fd, uint64_t bytes) {
  const uint64_t whole = bytes + page_size();
  void* reserved = mmap(nullptr, whole + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  KVSWAP_CHECK(reserved != MAP_FAILED, "the kernel has no room for a mapping of ", bytes,
               " bytes: ", std::strerror(errno));
  const auto first = reinterpret_cast<uint64_t>(reserved), begin = round_up(first, kHugePage);
  if (begin != first) munmap(reserved, begin - first);
  munmap(reinterpret_cast<void*>(begin + whole), first + kHugePage - begin);
  void* const address = reinterpret_cast<void*>(begin);
  const auto map = [&](int flags) {
    return mmap(address, bytes, PROT_READ | PROT_WRITE, flags | MAP_FIXED, fd, 0) != MAP_FAILED;
  };
  bool mapped = map(fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS);
  if (mapped && fd < 0 && madvise(address, bytes, kWipeOnFork) != 0) {
    mapped = map(MAP_SHARED | MAP_ANONYMOUS);  // a fork has the same pages
  }
  if (!mapped) {
    const int error = errno;
    munmap(address, whole);
    fail("the kernel does not map ", bytes, " bytes: ", std::strerror(error));
  }
  madvise(address, bytes, MADV_HUGEPAGE);
  return address;
}

void unmap_host(void* address, uint64_t bytes) { munmap(address, bytes + page_size()); }

bool bind_host(void* address, uint64_t bytes, int node) {
  constexpr int kNodes = 1024, kBits = 8 * sizeof(unsigned long);
  if (node < 0 || node >= kNodes) return false;
  unsigned long nodes[kNodes / kBits] = {};
  nodes[node / kBits] = 1ul << node % kBits;
  const uint64_t end = reinterpret_cast<uint64_t>(address) + bytes;
  const uint64_t begin = reinterpret_cast<uint64_t>(address) / page_size() * page_size();
  return syscall(SYS_mbind, begin, end - begin, kPreferredNode, nodes, kNodes + 1, 0) == 0;
}

void touch_host(void* address, uint64_t bytes, const Touch& how) {
  const uint64_t first = reinterpret_cast<uint64_t>(address), end = first + bytes;
  const uint64_t begin = first / page_size() * page_size();
  // Stripes end between huge pages, but for the last.
  std::atomic<uint64_t> next{begin / kHugePage * kHugePage};
  std::atomic<bool> wants_collapse{how.collapse};
  std::atomic<int> error{0};
  const auto work = [&] {
    while (error.load() == 0) {
      const uint64_t stripe = next.fetch_add(kStripe);
      if (stripe >= end) return;
      const uint64_t from = std::max(begin, stripe), to = std::min(end, stripe + kStripe);
      collapse(from, to, wants_collapse);
      if (const int refusal = populate(from, to)) error.store(refusal);
    }
  };
  const auto stripes = static_cast<int64_t>((end - begin) / kStripe + 1);
  std::vector<std::thread> threads;
  try {
    for (int64_t i = 0; i < std::min<int64_t>(how.threads, stripes); ++i) {
      threads.emplace_back([&] {
        pthread_setname_np(pthread_self(), "kvswap-touch");
        run_on(how.cpus);
        work();
      });
    }
  } catch (const std::exception&) {
    // A container may allow no more threads, and there may be no memory for one.
  }
  if (threads.empty()) work();
  for (std::thread& thread : threads) thread.join();
  KVSWAP_CHECK(error.load() == 0, "the kernel has no memory for ", bytes,
               " bytes that are mapped: ", std::strerror(error.load()));
}

}  // namespace kvswap
