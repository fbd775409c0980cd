#pragma once

#include <sstream>
#include <stdexcept>

namespace kvswap {

template <typename... Args>
[[noreturn]] void fail(const Args&... args) {
  std::ostringstream message;
  ((message << args), ...);
  throw std::runtime_error(message.str());
}

}  // namespace kvswap

// The message is evaluated only when the condition is false, so a check may describe what it saw at
// any length without costing the path that succeeds.
#define KVSWAP_CHECK(condition, ...)               \
  do {                                             \
    if (!(condition)) ::kvswap::fail(__VA_ARGS__); \
  } while (false)
