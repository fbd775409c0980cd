// Preloaded: lets one allocation of a library fail, counted from when the test says so.
#include <link.h>
#include <unwind.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

struct Range {
  uintptr_t begin = 0, end = 0;
  bool has(uintptr_t address) const { return address >= begin && address < end; }
};

struct Search {
  const char* name;
  Range found;
};

int look(dl_phdr_info* info, size_t, void* data) {
  Search& search = *static_cast<Search*>(data);
  if (std::strstr(info->dlpi_name, search.name) == nullptr) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type != PT_LOAD) continue;
    const uintptr_t begin = info->dlpi_addr + header.p_vaddr;
    if (search.found.begin == 0) search.found.begin = begin;
    search.found.end = begin + header.p_memsz;
  }
  return 1;
}

Range range_of(const char* name) {
  Search search{name, {}};
  dl_iterate_phdr(look, &search);
  return search.found;
}

Range library, standard, own;
std::atomic<long> left{0};  // allocations until the one that fails; 0: none does

struct Caller {
  uintptr_t address = 0;
};

// The first frame that is neither here nor in the C++ library.
_Unwind_Reason_Code next_frame(_Unwind_Context* context, void* data) {
  const uintptr_t address = _Unwind_GetIP(context);
  if (own.has(address) || standard.has(address)) return _URC_NO_REASON;
  static_cast<Caller*>(data)->address = address;
  return _URC_END_OF_STACK;
}

bool is_of_library(uintptr_t caller) {
  if (library.has(caller)) return true;
  if (!standard.has(caller)) return false;
  Caller found;
  _Unwind_Backtrace(next_frame, &found);
  return library.has(found.address);
}

}  // namespace

void* operator new(size_t bytes) {
  if (left.load() > 0 && is_of_library(reinterpret_cast<uintptr_t>(__builtin_return_address(0)))) {
    if (left.fetch_sub(1) == 1) throw std::bad_alloc();
  }
  void* memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

extern "C" {

// The nth allocation of the library from now on fails, in whatever thread. False where there is no
// library of that name.
bool allocations_fail(const char* name, long nth) {
  library = range_of(name);
  standard = range_of("libstdc++");
  own = range_of("liballocations");
  left = nth;
  return library.begin != 0 && standard.begin != 0;
}

// From now on none fails. Whether one has.
bool allocations_stop() { return left.exchange(0) <= 0; }

}  // extern "C"
