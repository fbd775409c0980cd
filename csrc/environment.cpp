#include "environment.h"

#include <cstdlib>
#include <string>

#include "check.h"

namespace kvswap {
namespace {

// The link starts when the driver has read a whole call. And with more than about 100 fragments of
// 16 KiB or less, a call to the GPU takes up to 2.5 us for each instead of 0.9: calls of 32 load 8
// blocks of 160 x 8 KiB, in tensors of their own, in 0.8 ms, and one call takes 2.9 ms. 64 blocks
// of 64 x 32 KiB: 4.4 and 6.6 ms (H200, driver 580).
constexpr size_t kDefaultBatchLimit = 32;

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
