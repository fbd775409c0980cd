#pragma once

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

// For those who look again and again for an end: no pause at first, since most transfers take some
// ten microseconds, and later a hundredth of the time waited so far, a millisecond at most.
inline void pause_since(double began) {
  const double waited = now() - began;
  if (waited < 200e-6) return std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::duration<double>(std::min(waited / 100, 1e-3)));
}

}  // namespace kvswap
