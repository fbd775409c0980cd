#pragma once

// The C interface to what is no op, called through ctypes with the GIL released.

#define KVSWAP_API extern "C" __attribute__((visibility("default")))

// The version of the CUDA driver, 13000 for 13.0; 0 without one. Does not initialise CUDA.
KVSWAP_API int kvswap_driver_version();

// Why there is no driver, or "". Valid as long as the library.
KVSWAP_API const char* kvswap_driver_error();

// Whether the driver has the batch call (CUDA 12.8 or newer).
KVSWAP_API bool kvswap_driver_has_batch();

// Fragments in one batch call; 0 where KVSWAP_BATCH switches it off; -1 where the environment is
// wrong: kvswap_last_error says how.
KVSWAP_API int kvswap_batch_limit();

// The version of the CUDA runtime in the kernels, 13000 for 13.0; 0 where there are none. They need
// a driver of the same major version or newer.
KVSWAP_API int kvswap_kernel_version();

// A stream on `device` that belongs to the caller alone: PyTorch's own come from a small pool, in
// which transfers would meet other people's work. Does not synchronise with the legacy default
// stream. Null on failure: kvswap_last_error says why.
KVSWAP_API void* kvswap_stream_create(int device);

// Work in the stream still runs to its end. False on failure.
KVSWAP_API bool kvswap_stream_destroy(int device, void* stream);

// The error of the calling thread's last call that failed. Valid until its next one.
KVSWAP_API const char* kvswap_last_error();
