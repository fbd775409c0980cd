#pragma once

#include <exception>

namespace kvswap {

// The error of the calling thread's last call of the C interface that failed, and the name of the
// Python exception that stands for it.
const char* last_error();
const char* last_error_type();

// Remembers the exception that is being handled. Cannot fail itself.
void remember_error() noexcept;

// Runs the body of a C function, which no exception may leave.
template <typename Body>
bool succeeds(const Body& body) {
  try {
    body();
    return true;
  } catch (...) {
    remember_error();
    return false;
  }
}

}  // namespace kvswap
