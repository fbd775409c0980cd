#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace kvswap {

// A wrong argument. csrc/bindings raises Python's exception of the same name.
struct ValueError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct IndexError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// The device does not do this at all.
struct NotImplementedError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// The device can no longer be used by this process.
struct DeviceLostError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <typename Error = std::runtime_error, typename... Args>
[[noreturn]] void fail(const Args&... args) {
  std::ostringstream message;
  message.exceptions(std::ios::badbit);  // else text without memory for it would be left out
  ((message << args), ...);
  throw Error(message.str());
}

// "1 block", "2 blocks".
template <typename Count>
std::string count_of(Count count, const char* noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

}  // namespace kvswap

// The message is evaluated only when the condition is false, so a check may describe at any length
// what it saw without a cost when it succeeds.
#define KVSWAP_CHECK(condition, ...)               \
  do {                                             \
    if (!(condition)) ::kvswap::fail(__VA_ARGS__); \
  } while (false)
