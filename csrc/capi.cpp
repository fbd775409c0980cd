#include "capi.h"

#include <string>

#include "cuda_context.h"
#include "cuda_driver.h"
#include "environment.h"

namespace {

thread_local std::string last_error;

// No exception may leave a C function.
template <typename Body>
bool succeeds(const Body& body) {
  try {
    body();
    return true;
  } catch (const std::exception& error) {
    last_error = error.what();
    return false;
  }
}

}  // namespace

int kvswap_driver_version() {
  int version = 0;
  const kvswap::cuda::Driver* driver = kvswap::cuda::find_driver();
  if (driver == nullptr || driver->get_version(&version) != kvswap::cuda::kSuccess) return 0;
  return version;
}

const char* kvswap_driver_error() { return kvswap::cuda::driver_error().c_str(); }

bool kvswap_driver_has_batch() {
  const kvswap::cuda::Driver* driver = kvswap::cuda::find_driver();
  return driver != nullptr && driver->copy_batch_async != nullptr;
}

int kvswap_batch_limit() {
  int limit = -1;
  succeeds([&] { limit = kvswap::batch_is_on() ? static_cast<int>(kvswap::batch_limit()) : 0; });
  return limit;
}

int kvswap_kernel_version() {
#ifdef KVSWAP_WITH_KERNELS
  return KVSWAP_WITH_KERNELS;
#else
  return 0;
#endif
}

void* kvswap_stream_create(int device) {
  void* stream = nullptr;
  const bool created = succeeds([&] {
    const kvswap::cuda::ContextGuard context(device);
    stream = kvswap::cuda::create_stream();
  });
  return created ? stream : nullptr;
}

bool kvswap_stream_destroy(int device, void* stream) {
  return succeeds([&] {
    const kvswap::cuda::ContextGuard context(device);
    KVSWAP_DRIVER_CHECK(kvswap::cuda::driver().destroy_stream(stream), "cuStreamDestroy");
  });
}

const char* kvswap_last_error() { return last_error.c_str(); }
