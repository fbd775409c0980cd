#pragma once

#include <cstddef>
#include <memory>
#include <unordered_map>
#include <vector>

#include "../cuda_driver.h"

namespace kvswap {

// A point in a stream that jobs start behind.
struct Moment {
  cuda::Event event;
  cuda::Stream stream;  // a handle of the channel's device
  int users;            // jobs
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
  void give(Moment* moment);
  bool is_over(const Moment& moment) const;

  size_t created() const { return all_.size(); }
  void destroy();

 private:
  Moment* make(cuda::Stream stream);

  std::vector<std::unique_ptr<Moment>> all_;
  std::vector<Moment*> idle_;
  std::unordered_map<cuda::Stream, Moment*> latest_;  // in use, of each stream
};

}  // namespace kvswap
