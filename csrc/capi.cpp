#include "capi.h"

#include "c_error.h"
#include "cuda_context.h"
#include "cuda_driver.h"
#include "environment.h"

using kvswap::succeeds;

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

bool kvswap_host_register(int device, void* address, uint64_t bytes) {
  return succeeds([&] {
    const kvswap::cuda::ContextGuard context(device);
    KVSWAP_DRIVER_CHECK(
        kvswap::cuda::driver().register_host(
            address, bytes, kvswap::cuda::kRegisterPortable | kvswap::cuda::kRegisterMapped),
        "cuMemHostRegister");
  });
}

bool kvswap_host_unregister(int device, void* address) {
  return succeeds([&] {
    const kvswap::cuda::ContextGuard context(device);
    KVSWAP_DRIVER_CHECK(kvswap::cuda::driver().unregister_host(address), "cuMemHostUnregister");
  });
}

const char* kvswap_last_error() { return kvswap::last_error().c_str(); }
const char* kvswap_last_error_type() { return kvswap::last_error_type(); }
