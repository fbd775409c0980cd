#include "c_error.h"

#include <new>
#include <string>

#include "check.h"

namespace kvswap {
namespace {

constexpr const char* kOutOfMemory = "out of host memory";

thread_local std::string text;
thread_local const char* shown = "";
thread_local const char* type = "RuntimeError";

void remember(const char* of_type, const char* message) noexcept {
  try {
    text = message;
    shown = text.c_str();
    type = of_type;
  } catch (const std::bad_alloc&) {
    shown = kOutOfMemory;
    type = "MemoryError";
  }
}

}  // namespace

const char* last_error() { return shown; }
const char* last_error_type() { return type; }

void remember_error() noexcept {
  try {
    throw;
  } catch (const IndexError& error) {
    remember("IndexError", error.what());
  } catch (const ValueError& error) {
    remember("ValueError", error.what());
  } catch (const std::bad_alloc&) {
    remember("MemoryError", kOutOfMemory);
  } catch (const std::exception& error) {
    remember("RuntimeError", error.what());
  }
}

}  // namespace kvswap
