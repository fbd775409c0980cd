// A CUDA driver for machines without one: "device" memory is host memory that it remembers, and
// copies are done at once and written to a log. It stands in for libcuda.so.1.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>
#include <string>

namespace {

constexpr int kInvalidValue = 1, kNotInitialized = 3, kNotFound = 500;

struct Allocation {
  uint64_t end;
  unsigned type;
  int device;
};
std::map<uint64_t, Allocation> allocations;  // by first address
std::ostringstream call_log;
int copies_until_failure = -1;
int initialized = 1, capturing = 0;
uintptr_t last_handle = 100;

bool copy_fails() { return copies_until_failure >= 0 && copies_until_failure-- == 0; }

void copy(uint64_t dst, uint64_t src, size_t bytes) {
  std::memcpy(reinterpret_cast<void*>(dst), reinterpret_cast<void*>(src), bytes);
}

int get_error_name(int, const char** text) { return *text = "CUDA_ERROR_STUB", 0; }
int get_error_string(int, const char** text) { return *text = "made up by the stub", 0; }
int get_version(int* version) { return *version = 12080, 0; }
int retain_primary_context(void** context, int device) {
  *context = reinterpret_cast<void*>(uintptr_t(device) + 1);
  return 0;
}
int push_context(void* context) {
  call_log << "push context of device " << reinterpret_cast<uintptr_t>(context) - 1 << "\n";
  return 0;
}
int pop_context(void**) { return call_log << "pop context\n", 0; }

int get_pointer_attributes(unsigned count, int* names, void** values, unsigned long long address) {
  if (!initialized) return kNotInitialized;
  auto next = allocations.upper_bound(address);
  const bool known = next != allocations.begin() && address < std::prev(next)->second.end;
  const Allocation found = known ? std::prev(next)->second : Allocation{0, 0, -1};
  const uint64_t begin = known ? std::prev(next)->first : 0;
  for (unsigned i = 0; i < count; ++i) {
    if (names[i] == 2) *static_cast<unsigned*>(values[i]) = found.type;
    if (names[i] == 9) *static_cast<int*>(values[i]) = found.device;
    if (names[i] == 11 || names[i] == 19) *static_cast<unsigned long long*>(values[i]) = begin;
    if (names[i] == 12 || names[i] == 18) *static_cast<size_t*>(values[i]) = found.end - begin;
  }
  return 0;
}

int copy_async(unsigned long long dst, unsigned long long src, size_t bytes, void* stream) {
  if (copy_fails()) return kInvalidValue;
  call_log << "copy " << bytes << " bytes on stream " << reinterpret_cast<uintptr_t>(stream)
           << "\n";
  return copy(dst, src, bytes), 0;
}

int copy_peer_async(unsigned long long, void*, unsigned long long, void*, size_t, void*) {
  return kInvalidValue;  // no test copies between two GPUs of the stub
}

struct Attributes {
  int order, hints[4];
  unsigned flags;
};

int copy_batch_async(unsigned long long* dsts, unsigned long long* srcs, size_t* sizes,
                     size_t count, Attributes* attributes, size_t* starts, size_t attribute_count,
                     size_t* failed, void* stream) {
  if (reinterpret_cast<uintptr_t>(stream) <= 1) return kInvalidValue;
  call_log << "batch of " << count << " on stream " << reinterpret_cast<uintptr_t>(stream)
           << ", source order";
  for (size_t i = 0; i < attribute_count; ++i) {
    call_log << " " << attributes[i].order << " from " << starts[i];
  }
  call_log << "\n";
  for (size_t i = 0; i < count; ++i) {
    if (copy_fails()) return *failed = i, kInvalidValue;
    copy(dsts[i], srcs[i], sizes[i]);
  }
  return 0;
}

int create_stream(void** stream, unsigned) {
  *stream = reinterpret_cast<void*>(++last_handle);
  return call_log << "create stream " << last_handle << "\n", 0;
}
int destroy_stream(void*) { return 0; }
int synchronize_stream(void* stream) {
  return call_log << "synchronize stream " << reinterpret_cast<uintptr_t>(stream) << "\n", 0;
}
int is_capturing(void*, int* status) { return *status = capturing, 0; }
int create_event(void** event, unsigned) { return *event = &call_log, 0; }
int destroy_event(void*) { return 0; }
int record_event(void*, void* stream) {
  return call_log << "record on stream " << reinterpret_cast<uintptr_t>(stream) << "\n", 0;
}
int wait_event(void* stream, void*, unsigned) {
  return call_log << "wait on stream " << reinterpret_cast<uintptr_t>(stream) << "\n", 0;
}

const std::map<std::string, void*> functions = {
    {"cuGetErrorName", reinterpret_cast<void*>(&get_error_name)},
    {"cuGetErrorString", reinterpret_cast<void*>(&get_error_string)},
    {"cuDriverGetVersion", reinterpret_cast<void*>(&get_version)},
    {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(&retain_primary_context)},
    {"cuCtxPushCurrent", reinterpret_cast<void*>(&push_context)},
    {"cuCtxPopCurrent", reinterpret_cast<void*>(&pop_context)},
    {"cuPointerGetAttributes", reinterpret_cast<void*>(&get_pointer_attributes)},
    {"cuMemcpyAsync", reinterpret_cast<void*>(&copy_async)},
    {"cuMemcpyPeerAsync", reinterpret_cast<void*>(&copy_peer_async)},
    {"cuMemcpyBatchAsync", reinterpret_cast<void*>(&copy_batch_async)},
    {"cuStreamCreate", reinterpret_cast<void*>(&create_stream)},
    {"cuStreamDestroy", reinterpret_cast<void*>(&destroy_stream)},
    {"cuStreamSynchronize", reinterpret_cast<void*>(&synchronize_stream)},
    {"cuStreamIsCapturing", reinterpret_cast<void*>(&is_capturing)},
    {"cuEventCreate", reinterpret_cast<void*>(&create_event)},
    {"cuEventDestroy", reinterpret_cast<void*>(&destroy_event)},
    {"cuEventRecord", reinterpret_cast<void*>(&record_event)},
    {"cuStreamWaitEvent", reinterpret_cast<void*>(&wait_event)},
};

}  // namespace

extern "C" {

int cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int*) {
  // STUB_WITHOUT names a function that this driver does not have.
  const char* missing = std::getenv("STUB_WITHOUT");
  const auto found = functions.find(name);
  if (found == functions.end() || (missing && std::string(missing) == name)) return kNotFound;
  return *function = found->second, 0;
}

void stub_add(uint64_t address, uint64_t bytes, unsigned type, int device) {
  allocations[address] = {address + bytes, type, device};
}
void stub_fail_copy(int index) { copies_until_failure = index; }
void stub_set_capturing(int value) { capturing = value; }
void stub_set_initialized(int value) { initialized = value; }

const char* stub_take_log() {
  static std::string text;
  text = call_log.str();
  call_log.str("");
  return text.c_str();
}
}
