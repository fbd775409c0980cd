#include "environment.h"

#include <cstdlib>
#include <string>

#include "check.h"

namespace kvswap {
namespace {

// One call with 51,828 fragments was reported to crash a driver, and the call's cost per fragment
// is flat from some hundreds on.
constexpr size_t kDefaultBatchLimit = 8192;

std::string value_of(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? "" : text;
}

bool flag(const char* name, bool otherwise) {
  const std::string value = value_of(name);
  if (value.empty()) return otherwise;
  if (value != "0" && value != "1") fail<ValueError>(name, " is '", value, "'; expected 0 or 1");
  return value == "1";
}

}  // namespace

bool batch_is_on() { return flag("KVSWAP_BATCH", true); }

size_t batch_limit() {
  const std::string value = value_of("KVSWAP_BATCH_LIMIT");
  if (value.empty()) return kDefaultBatchLimit;
  const bool is_number = value.size() <= 9 && value.find_first_not_of("0123456789") == value.npos;
  const size_t limit = is_number ? std::stoul(value) : 0;
  if (limit == 0) {
    fail<ValueError>("KVSWAP_BATCH_LIMIT is '", value,
                     "'; expected a number of fragments per driver call, 1 to 999999999");
  }
  return limit;
}

bool address_check_is_on() { return flag("KVSWAP_CHECK_ADDRESSES", false); }

}  // namespace kvswap
