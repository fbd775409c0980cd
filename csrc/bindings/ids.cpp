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
    Py_buffer buffer;
    if (PyObject_GetBuffer(ids.ptr(), &buffer, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) == 0) {
      const bool is_read = read_buffer(buffer, to);
      PyBuffer_Release(&buffer);
      if (is_read) return;
    } else {
      PyErr_Clear();
    }
  }
  // Everything else is rare, or wrong.
  const nb::object read = python.read_ids(name, ids, num_groups);
  Py_buffer buffer;
  if (PyObject_GetBuffer(read.ptr(), &buffer, PyBUF_FORMAT) != 0) throw nb::python_error();
  append<int64_t>(buffer, to);
  PyBuffer_Release(&buffer);
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

nb::any read_ids_for_python(const std::string& name, nb::handle ids) {
  std::vector<int64_t> read;
  read_ids(name, ids, read);
  const nb::bytes bytes(read.data(), read.size() * sizeof(int64_t));
  return as_any(nb::module_::import_("array").attr("array")("q", bytes));
}

nb::any to_numpy(const std::vector<int64_t>& numbers) {
  // nanobind takes three times as long to make an array.
  static const nb::handle numpy = nb::module_::import_("numpy").release();
  static const nb::handle empty = nb::object(numpy.attr("empty")).release();
  static const nb::handle type = nb::object(numpy.attr("dtype")("int64")).release();
  const nb::object array = empty(numbers.size(), type);
  Py_buffer buffer;
  if (PyObject_GetBuffer(array.ptr(), &buffer, PyBUF_WRITABLE) != 0) throw nb::python_error();
  std::copy(numbers.begin(), numbers.end(), static_cast<int64_t*>(buffer.buf));
  PyBuffer_Release(&buffer);
  return as_any(array);
}

}  // namespace kvswap::bindings
