#pragma once

// For functions that the kernels and the C++ compiler share.
#ifdef __CUDACC__
#define KVSWAP_HOST_DEVICE __host__ __device__
#else
#define KVSWAP_HOST_DEVICE
#endif
