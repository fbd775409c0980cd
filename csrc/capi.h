#pragma once

// The C interface to what is no op, called through ctypes with the GIL released.

#define KVSWAP_API extern "C" __attribute__((visibility("default")))

// The version of the CUDA driver, 13000 for 13.0; 0 without one. Does not initialise CUDA.
KVSWAP_API int kvswap_driver_version();

// Why there is no driver, or "". Valid as long as the library.
KVSWAP_API const char* kvswap_driver_error();

// Whether the driver has the batch call (CUDA 12.8 or newer).
KVSWAP_API bool kvswap_driver_has_batch();

// Whether this library was built with nvcc and holds CUDA kernels.
KVSWAP_API bool kvswap_has_kernels();
