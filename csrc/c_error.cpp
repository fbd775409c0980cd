#include "c_error.h"

#include <new>

#include "check.h"

namespace kvswap {
namespace {

thread_local std::string text;
thread_local const char* type = "RuntimeError";

}  // namespace

const std::string& last_error() { return text; }
const char* last_error_type() { return type; }

void remember_error() {
  type = "RuntimeError";
  try {
    throw;
  } catch (const IndexError& error) {
    type = "IndexError";
    text = error.what();
  } catch (const ValueError& error) {
    type = "ValueError";
    text = error.what();
  } catch (const std::bad_alloc&) {
    type = "MemoryError";
    text = "out of host memory";
  } catch (const std::exception& error) {
    text = error.what();
  }
}

}  // namespace kvswap
