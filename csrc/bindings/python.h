#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "encoding/encoding.h"

// What the bindings share. No native code calls Python, or waits for the GIL, with a lock of the
// library held. Python's locks are taken first, then native ones. A thread that holds the GIL takes
// only native locks that are held for microseconds, and releases the GIL where it could wait
// longer: while csrc/offload/ runs, in waits (for 0.1 s at a time, so that signal handlers run), in
// calls of a block manager with more than 1,024 keys, and while a server or a store is asked. The
// threads of channels never take it.
//
// A free-threaded Python needs PYTHON_GIL=1, because the GIL protects lists of ids and keys while
// they are read, the tags and groups of PyHandler, and the tensors that cache_has_moved checks.
namespace kvswap::bindings {

namespace nb = nanobind;
using namespace nanobind::literals;

// Python's side of the boundary: what reads unusual arguments, and what native code makes instances
// of. Each module names its own with set_python(), when it is imported. Never freed: threads and
// finalizers may still call when the interpreter ends.
struct Python {
  nb::handle read_ids;                        // (name, ids, num_groups) -> array("q")
  nb::handle split_ids;                       // (name, ids, num_groups) -> list
  nb::handle read_first_slots;                // (first_slot, num_groups) -> list
  nb::handle hash_keys;                       // (name, keys) -> bytes
  nb::handle kind_of, read_int, read_switch;  // of arguments.py
  nb::handle make_error;                      // (kind, message, rejected) -> TransferError
  nb::handle empty, int64;                    // NumPy's
  nb::handle Result, Lookup, PrefixKeys, DeviceLostError;
};
extern Python python;

// Knows the process in which an object was made.
class ForkGuard {
 public:
  explicit ForkGuard(const char* noun);
  bool is_current() const;
  // Throws in a forked child.
  void check() const;

 private:
  const char* noun_;
  const int pid_, forks_;
};

// Without the GIL, as long as it exists. While Python ends, a thread that takes the GIL is ended by
// pthread_exit(), whose unwinding would pass functions that must not throw, and end the process. So
// such a thread sleeps for ever, as from Python 3.14 on.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // only that unwinding comes here
      for (;;) pause();
    }
  }

 private:
  PyThreadState* const state_;
};

// Runs `call` without the GIL.
template <typename Call>
auto without_gil(const Call& call) {
  const WithoutGil released;
  return call();
}

// What the type stubs call Any.
inline nb::any as_any(const nb::object& object) { return nb::borrow<nb::any>(object); }

// The items of a list. nanobind's own conversion of a list to a vector ends the process if there is
// no memory for it.
template <typename Item>
std::vector<Item> items_of(nb::handle list) {
  std::vector<Item> items;
  for (const nb::handle item : list) items.push_back(nb::cast<Item>(item));
  return items;
}

// A NumPy array [numbers] of int64.
nb::any to_numpy(const std::vector<int64_t>& numbers);

// Appends integers of a list, an array, a NumPy array or a CPU tensor. Throws the exceptions of
// torch_kvswap/_native/ids.py, which name the argument `name`.
void read_ids(const std::string& name, nb::handle ids, std::vector<int64_t>& to,
              int num_groups = 1);
// The same for an argument that has a list of them for each group.
std::vector<nb::object> split_ids(const char* name, nb::handle ids, int num_groups);

// The numbers of an array that this library has made.
template <typename Number = int64_t>
std::vector<Number> read_numbers(nb::handle numbers) {
  std::vector<int64_t> read;
  read_ids("numbers", numbers, read);
  return {read.begin(), read.end()};
}

// How a pool keeps blocks. Shared with native groups, which must not need the GIL to let go of it.
struct PyEncoding {
  std::shared_ptr<const Encoding> encoding;
};

void bind_block_manager(nb::module_& module);
void bind_encoding(nb::module_& module);
void bind_handler(nb::module_& module);
void bind_memory(nb::module_& module);

}  // namespace kvswap::bindings
