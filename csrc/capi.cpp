#include "capi.h"

#include "cuda_driver.h"

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
