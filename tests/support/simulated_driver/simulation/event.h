#pragma once

#include <cstdint>
#include <memory>

namespace simulated {

// One call of cuEventRecord. Waits refer to it, so that a later record of the event changes nothing
// for them.
struct Record {
  uint64_t stream = 0;  // its key
  bool captured = false;
  bool happened = false;
  double time = 0;  // milliseconds of the simulated clock
};

struct Event {
  int number = 0;  // in the order of creation
  int device = 0;  // in whose context it was created
  bool timed = true;
  std::shared_ptr<Record> latest;  // null before the first record
};

}  // namespace simulated
