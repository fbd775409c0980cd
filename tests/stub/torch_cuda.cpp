// Stands in for libtorch_cuda.so: one current stream per device.
#include <cstdint>
#include <map>

namespace {
std::map<int32_t, void*> streams;
}

extern "C" {

int aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  return *stream = streams[device], 0;
}

void stub_set_stream(int32_t device, uintptr_t stream) {
  streams[device] = reinterpret_cast<void*>(stream);
}
}
