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

// Without the 50 us that Linux adds to a sleep, to wake several threads at once: the calling
// thread's own, until this has slept.
inline void sleep_precisely(double seconds) {
  const int slack = prctl(PR_GET_TIMERSLACK);
  prctl(PR_SET_TIMERSLACK, 1);
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  prctl(PR_SET_TIMERSLACK, slack);
}

// For those who look again and again for an end: no pause at first, since a transfer of some blocks
// takes less than a sleep is late by (15 us), and later a 300th of the time waited so far, half a
// millisecond at most.
inline void pause_since(double began) {
  const double waited = now() - began;
  if (waited < 1e-3) return std::this_thread::yield();
  sleep_precisely(std::min(waited / 300, 0.5e-3));
}

}  // namespace kvswap
