#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <map>
#include <new>

#include "bindings/python.h"
#include "check.h"

// The boundary between Python and C++: the module torch_kvswap._C. The ops are in csrc/ops.
namespace kvswap::bindings {

Python python;

namespace {

std::atomic<int> forks{0};

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const IndexError& error) {
    PyErr_SetString(PyExc_IndexError, error.what());
  } catch (const ValueError& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const NotImplementedError& error) {
    PyErr_SetString(PyExc_NotImplementedError, error.what());
  } catch (const DeviceLostError& error) {
    PyErr_SetString(python.DeviceLostError.ptr(), error.what());
  } catch (const std::bad_alloc&) {
    PyErr_SetString(PyExc_MemoryError, "out of host memory");
  }
}

// Takes what Python names. A name that is not known is a mistake of this library.
void set_python(const nb::kwargs& named) {
  const std::map<std::string, nb::handle*> places{{"read_ids", &python.read_ids},
                                                  {"split_ids", &python.split_ids},
                                                  {"read_first_slots", &python.read_first_slots},
                                                  {"hash_keys", &python.hash_keys},
                                                  {"kind_of", &python.kind_of},
                                                  {"read_int", &python.read_int},
                                                  {"read_switch", &python.read_switch},
                                                  {"make_error", &python.make_error},
                                                  {"empty", &python.empty},
                                                  {"int64", &python.int64},
                                                  {"Result", &python.Result},
                                                  {"Lookup", &python.Lookup},
                                                  {"PrefixKeys", &python.PrefixKeys},
                                                  {"DeviceLostError", &python.DeviceLostError}};
  for (const auto& [name, object] : named) {
    *places.at(nb::cast<std::string>(name)) = nb::object(nb::borrow(object)).release();
  }
}

}  // namespace

ForkGuard::ForkGuard(const char* noun) : noun_(noun), pid_(getpid()), forks_(forks) {}

bool ForkGuard::is_current() const { return forks_ == forks; }

void ForkGuard::check() const {
  KVSWAP_CHECK(is_current(), "this ", noun_, " belongs to process ", pid_,
               " and cannot be used in process ", getpid(), ", forked from it; make a ", noun_,
               " in each process");
}

}  // namespace kvswap::bindings

NB_MODULE(_C, module) {
  using namespace kvswap::bindings;
  module.doc() = "The native library of torch_kvswap. Not for users.";
  // What Python still holds when the interpreter ends is not freed by it.
  nb::set_leak_warnings(false);
  nb::register_exception_translator(translate);
  pthread_atfork(nullptr, nullptr, [] { ++forks; });
  module.def(
      "stub", [] { return KVSWAP_STUB; },
      "SHA-256 of torch_kvswap/_C.pyi when the library was built.");
  module.def(
      "wake",
      [](int eventfd) {
        const uint64_t one = 1;
        KVSWAP_CHECK(write(eventfd, &one, sizeof one) == sizeof one, "an eventfd is full");
      },
      "eventfd"_a,
      "Adds 1 to an eventfd. Keeps the GIL, which the thread that wakes would take at once.");
  module.def(
      "never_free", [](nb::object object) { object.release(); }, "object"_a,
      "Not even while the interpreter ends.");
  module.def("set_python", set_python, nb::sig("def set_python(**named: typing.Any) -> None"));
  module.def(
      "read_ids",
      [](const std::string& name, nb::handle ids) {
        std::vector<int64_t> read;
        read_ids(name, ids, read);
        const nb::bytes bytes(read.data(), read.size() * sizeof(int64_t));
        const nb::object array = nb::module_::import_("array").attr("array")("q", bytes);
        const auto [least, largest] = std::minmax_element(read.begin(), read.end());
        if (read.empty()) return nb::make_tuple(array, 0, -1);
        return nb::make_tuple(array, *least, *largest);
      },
      "name"_a, "ids"_a.none(),
      nb::sig("def read_ids(name: str, ids: object | None) -> tuple[typing.Any, int, int]"),
      "Copies ids of a list, an array, a NumPy array or a CPU tensor to an array(\"q\"). Returns "
      "it, and the least and the largest id. name: the argument, for errors.");
  bind_memory(module);
  bind_encoding(module);
  bind_handler(module);
  bind_block_manager(module);
}
