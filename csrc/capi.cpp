#include "capi.h"

#include <string>

#include "check.h"
#include "cuda_context.h"
#include "cuda_driver.h"

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
  const kvswap::cuda::Driver* driver = kvswap::cuda::driver();
  if (driver == nullptr || driver->get_version(&version) != kvswap::cuda::kSuccess) return 0;
  return version;
}

const char* kvswap_driver_error() { return kvswap::cuda::driver_error().c_str(); }

bool kvswap_driver_has_batch() {
  const kvswap::cuda::Driver* driver = kvswap::cuda::driver();
  return driver != nullptr && driver->copy_batch_async != nullptr;
}

bool kvswap_has_kernels() {
#ifdef KVSWAP_WITH_KERNELS
  return true;
#else
  return false;
#endif
}

void* kvswap_stream_create(int device) {
  void* stream = nullptr;
  const bool created = succeeds([&] {
    KVSWAP_CHECK(kvswap::cuda::driver() != nullptr, kvswap::cuda::driver_error());
    const kvswap::cuda::ContextGuard context(device);
    stream = kvswap::cuda::create_stream();
  });
  return created ? stream : nullptr;
}

bool kvswap_stream_destroy(int device, void* stream) {
  return succeeds([&] {
    const kvswap::cuda::ContextGuard context(device);
    KVSWAP_DRIVER_CHECK(kvswap::cuda::driver()->destroy_stream(stream), "cuStreamDestroy");
  });
}

const char* kvswap_last_error() { return last_error.c_str(); }
