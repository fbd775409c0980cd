// Threads that a test wants to come late.
#include <semaphore.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

namespace {

int way_on[2];
sem_t stopped;

void stand_still(int) {
  const int before = errno;
  char byte;
  sem_post(&stopped);
  while (read(way_on[0], &byte, 1) < 0 && errno == EINTR) {
  }
  errno = before;
}

bool prepare() {
  struct sigaction action{};
  action.sa_handler = stand_still;
  action.sa_flags = SA_RESTART;
  return pipe(way_on) == 0 && sem_init(&stopped, 0, 0) == 0 &&
         sigaction(SIGUSR2, &action, nullptr) == 0;
}

}  // namespace

extern "C" {

// Wherever it is. Returns when it stands.
bool simulated_stop_thread(int thread) {
  static const bool prepared = prepare();
  if (!prepared || syscall(SYS_tgkill, getpid(), thread, SIGUSR2) != 0) return false;
  while (sem_wait(&stopped) != 0) {
  }
  return true;
}

bool simulated_let_thread_go() { return write(way_on[1], "", 1) == 1; }

}  // extern "C"
