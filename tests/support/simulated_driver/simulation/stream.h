#pragma once

#include <cstdint>
#include <deque>

#include "operation.h"

namespace simulated {

// Work in the order of submission.
struct Stream {
  int device = 0;  // whose context it belongs to
  std::deque<Operation> queue;
  uint64_t submitted = 0, ended = 0;  // operations so far
  bool created = false;               // by a call; others exist from their first use
  bool is_callers = false;            // made by the test, which could have passed handle 0
  bool destroyed = false;             // still runs what it holds
  bool capturing = false;

  bool ready() const { return !queue.empty() && queue.front().ready(); }

  void push(Operation operation) {
    if (capturing) return;  // into a graph, which nobody launches
    queue.push_back(std::move(operation));
    ++submitted;
  }

  void pop() {
    queue.pop_front();
    ++ended;
  }

  // happens: whether the events that it would have recorded do.
  void drop(bool happens = true) {
    for (Operation& operation : queue) {
      // Lets go who waits for it.
      if (operation.kind == Operation::kRecord) operation.record->happened = happens;
    }
    queue.clear();
    ended = submitted;
  }
};

}  // namespace simulated
