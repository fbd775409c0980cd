// Stands in for libcuda.so.1.
#include <cstdint>

#include "../simulation/result.h"

extern "C" {

void* simulated_function(const char* name);

int cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int*) {
  *function = simulated_function(name);
  return *function == nullptr ? simulated::kNotFound : simulated::kSuccess;
}
}
