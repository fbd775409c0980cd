#include "environment.h"

#include <cstdlib>
#include <string>

#include "check.h"

namespace kvswap {
namespace {

bool flag(const char* name) {
  const char* text = std::getenv(name);
  const std::string value = text == nullptr ? "" : text;
  if (value.empty()) return false;
  if (value != "0" && value != "1") fail<ValueError>(name, " is '", value, "'; it must be 0 or 1");
  return value == "1";
}

}  // namespace

bool address_check_is_on() { return flag("KVSWAP_CHECK_ADDRESSES"); }

bool cpu_is_late() { return flag("KVSWAP_LATE_CPU"); }

}  // namespace kvswap
