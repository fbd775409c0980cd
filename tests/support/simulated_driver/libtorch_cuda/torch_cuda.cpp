// Stands in for libtorch_cuda.so: one current stream per device.
#include <cstdint>
#include <map>
#include <mutex>

namespace {
std::mutex mutex;
std::map<int32_t, void*> streams;
}  // namespace

extern "C" {

int aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  return *stream = streams[device], 0;
}

void simulated_set_stream(int32_t device, uintptr_t stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  streams[device] = reinterpret_cast<void*>(stream);
}

void simulated_reset_streams() {
  const std::lock_guard<std::mutex> lock(mutex);
  streams.clear();
}
}
