#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/driver.h"

namespace kvswap {

// A point in a stream that jobs start behind.
struct Moment {
  cuda::Event event = nullptr;
  cuda::Stream stream = nullptr;  // a handle of the channel's device
  uint64_t number = 0;            // grows with each record
  int users = 0;                  // jobs
};

// The moments of the jobs of a channel.
//
// Each job has one of its own until there are kMostMoments. From then on the jobs behind the same
// stream share its latest, which is recorded again for each of them: a job then starts behind more
// than it asked for. No stream can wait for that job yet, so that this cannot come full circle:
// whoever waits for a job has it enqueued first, and it waits for the moment as it is then.
//
// Not thread safe: the handler has a lock. All streams are of the handler's device, whose context
// is current.
class Moments {
 public:
  // Behind all that the stream was given so far; null when that is over.
  Moment* take(cuda::Stream stream);
  void give(Moment* moment) noexcept;
  bool is_over(const Moment& moment) const;

  size_t created() const { return all_.size(); }
  void destroy();

 private:
  Moment* latest(cuda::Stream stream) const;
  Moment* take_idle();

  std::vector<std::unique_ptr<Moment>> all_;
  std::vector<Moment*> idle_;  // has room for all
  uint64_t records_ = 0;
};

}  // namespace kvswap
