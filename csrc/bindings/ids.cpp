#include <cstring>

#include "bindings/python.h"

namespace kvswap::bindings {
namespace {

// Ids read from a list with the GIL held, before other threads get a chance to run.
constexpr Py_ssize_t kAtOnce = 16 * 1024;

// False if some item is no int that fits.
bool read_list(PyObject* list, std::vector<int64_t>& to) {
  to.reserve(to.size() + static_cast<size_t>(PyList_Size(list)));
  for (Py_ssize_t i = 0; i < PyList_Size(list); ++i) {
    PyObject* item = PyList_GetItem(list, i);  // borrowed
    if (!PyLong_CheckExact(item)) return false;
    int overflow = 0;
    const int64_t id = PyLong_AsLongLongAndOverflow(item, &overflow);
    if (overflow != 0) return false;
    to.push_back(id);
    if (i % kAtOnce == kAtOnce - 1) without_gil([] {});
  }
  return true;
}

// The memory of an object; not `is_given` if it has none of this kind.
class Buffer {
 public:
  Buffer(nb::handle object, int flags)
      : is_given(PyObject_GetBuffer(object.ptr(), &view, flags) == 0) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (is_given) PyBuffer_Release(&view);
  }

  Py_buffer view;
  const bool is_given;
};

template <typename Number>
void append(const Py_buffer& buffer, std::vector<int64_t>& to) {
  const auto* numbers = static_cast<const Number*>(buffer.buf);
  to.insert(to.end(), numbers, numbers + buffer.len / buffer.itemsize);
}

// False if the buffer has anything but integers in a row that int64 holds.
bool read_buffer(const Py_buffer& buffer, std::vector<int64_t>& to) {
  const char* format = buffer.format;
  if (buffer.ndim != 1 || format == nullptr || std::strlen(format) != 1) return false;
  if (std::strchr("ilq", *format) != nullptr) {
    if (buffer.itemsize == 8) return append<int64_t>(buffer, to), true;
    if (buffer.itemsize == 4) return append<int32_t>(buffer, to), true;
  }
  return false;
}

}  // namespace

void read_ids(const std::string& name, nb::handle ids, std::vector<int64_t>& to, int num_groups) {
  const size_t before = to.size();
  if (PyList_CheckExact(ids.ptr())) {
    if (read_list(ids.ptr(), to)) return;
    to.resize(before);
  } else {
    const Buffer buffer(ids, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS);
    if (buffer.is_given) {
      if (read_buffer(buffer.view, to)) return;
    } else if (PyErr_ExceptionMatches(PyExc_TypeError) ||
               PyErr_ExceptionMatches(PyExc_ValueError) ||
               PyErr_ExceptionMatches(PyExc_BufferError)) {
      PyErr_Clear();
    } else {
      throw nb::python_error();
    }
  }
  // Everything else is rare, or wrong.
  const nb::object read = python.read_ids(name, ids, num_groups);
  const Buffer buffer(read, PyBUF_FORMAT);
  if (!buffer.is_given) throw nb::python_error();
  append<int64_t>(buffer.view, to);
}

std::vector<nb::object> split_ids(const char* name, nb::handle ids, int num_groups) {
  nb::object several = nb::borrow(ids);
  if (!PyList_CheckExact(ids.ptr()) || PyList_Size(ids.ptr()) != num_groups) {
    several = python.split_ids(name, ids, num_groups);
  }
  std::vector<nb::object> split;
  for (const nb::handle one : several) split.push_back(nb::borrow(one));
  return split;
}

nb::any to_numpy(const std::vector<int64_t>& numbers) {
  // nanobind takes three times as long to make an array.
  const nb::object array = python.empty(numbers.size(), python.int64);
  const Buffer buffer(array, PyBUF_WRITABLE);
  if (!buffer.is_given) throw nb::python_error();
  std::copy(numbers.begin(), numbers.end(), static_cast<int64_t*>(buffer.view.buf));
  return as_any(array);
}

}  // namespace kvswap::bindings
