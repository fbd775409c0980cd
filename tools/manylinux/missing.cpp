// A source of wheels only: what g++ makes use of, and glibc 2.28 or the libstdc++ of GCC 8 lacks.
// Each has the release that brought it.
#include <dlfcn.h>
#include <pthread.h>
#include <time.h>

#include <new>
#include <sstream>

extern "C" {
// glibc 2.32. 0: reference counts always use atomic instructions.
char __libc_single_threaded = 0;

// glibc 2.30. An older one waits by the wall clock: if that is set meanwhile, the wait times out
// earlier or later.
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const timespec* until) {
  using Wait = int (*)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*);
  static const auto wait = reinterpret_cast<Wait>(dlsym(RTLD_DEFAULT, "pthread_cond_clockwait"));
  if (wait != nullptr) return wait(condition, mutex, clock, until);
  constexpr long kSecond = 1'000'000'000;
  timespec now, wall;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &wall);
  const long nanoseconds = wall.tv_nsec + until->tv_nsec - now.tv_nsec + kSecond;  // none below 0
  wall.tv_sec += until->tv_sec - now.tv_sec + nanoseconds / kSecond - 1;
  wall.tv_nsec = nanoseconds % kSecond;
  return pthread_cond_timedwait(condition, mutex, &wall);
}
}

namespace std {
void __throw_bad_array_new_length() { throw bad_array_new_length(); }  // GCC 11
}  // namespace std

// GCC 9
template std::basic_ostringstream<char>::basic_ostringstream();
template std::basic_stringstream<char>::basic_stringstream();
