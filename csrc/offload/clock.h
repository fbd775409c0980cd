#pragma once

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace kvswap {

// Seconds on the clock of Python's time.perf_counter() and time.monotonic().
inline double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// Sleeps without the 50 us by which Linux may delay a wake-up to combine it with others.
inline void sleep_precisely(double seconds) {
  const int slack = prctl(PR_GET_TIMERSLACK);
  prctl(PR_SET_TIMERSLACK, 1);
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  prctl(PR_SET_TIMERSLACK, slack);
}

// The pause between two polls of a thread that has waited since `began`. For the first four
// milliseconds it only yields: a sleep ends 15 us late, which is 1 % of what 64 blocks take. Then
// it sleeps for 1/300 of the time waited so far, up to half a millisecond.
inline void pause_since(double began) {
  const double waited = now() - began;
  if (waited < 4e-3) return std::this_thread::yield();
  sleep_precisely(std::min(waited / 300, 0.5e-3));
}

}  // namespace kvswap
