#include <cstdio>
#include <string>

#include "bindings/python.h"
#include "cuda/driver.h"
#include "device/cuda.h"
#include "host_memory.h"
#include "ops/library.h"

// The driver, host memory, and the memory of caches. Calls of the driver and of the kernel that may
// take long release the GIL.
namespace kvswap::bindings {
namespace {

Device& cuda_device(int index) { return find_device(DeviceKind::kCuda, index); }

void* at(uintptr_t address) { return reinterpret_cast<void*>(address); }

int kernel_version() {
#ifdef KVSWAP_WITH_KERNELS
  return KVSWAP_WITH_KERNELS;
#else
  return 0;
#endif
}

int driver_version() {
  int version = 0;
  const cuda::Driver* driver = cuda::find_driver();
  if (driver == nullptr || driver->get_version(&version) != cuda::kSuccess) return 0;
  return version;
}

std::string pci_address(int device) {
  int numbers[3];
  int* next = numbers;
  for (const int attribute : {cuda::kPciDomain, cuda::kPciBus, cuda::kPciDevice}) {
    KVSWAP_DRIVER_CHECK(cuda::driver().get_device_attribute(next++, attribute, device),
                        "cuDeviceGetAttribute", " of CUDA device ", device);
  }
  char text[32];
  std::snprintf(text, sizeof text, "%04x:%02x:%02x.0", numbers[0], numbers[1], numbers[2]);
  return text;
}

}  // namespace

void bind_memory(nb::module_& module) {
  using ReleaseGil = nb::call_guard<WithoutGil>;
  module.def("driver_version", driver_version, ReleaseGil(),
             "13000 for 13.0; 0 without a driver. Does not initialise CUDA.");
  module.def(
      "driver_error", [] { return cuda::driver_error(); }, "Why there is no driver, or \"\".");
  module.def(
      "driver_has_batch",
      [] {
        const cuda::Driver* driver = cuda::find_driver();
        return driver != nullptr && driver->copy_batch_async != nullptr;
      },
      "Whether the driver has the batch call (CUDA 12.8 or newer).");
  module.def("kernel_version", kernel_version,
             "Of the CUDA runtime in the kernels, 13000 for 13.0; 0 without kernels. They need a "
             "driver of the same major version or newer.");

  module.def(
      "register_host",
      [](int device, uintptr_t address, uint64_t nbytes) {
        register_host(device, at(address), nbytes);
      },
      "device"_a, "address"_a, "nbytes"_a, ReleaseGil(),
      "Pins memory for every device of the process. Safe while another thread captures a graph. "
      "Raises NotImplementedError where only allocate_host() gives pinned memory.");
  module.def(
      "unregister_host",
      [](int device, uintptr_t address) { unregister_host(device, at(address)); }, "device"_a,
      "address"_a, ReleaseGil());
  module.def(
      "allocate_host",
      [](int device, uint64_t nbytes) {
        return reinterpret_cast<uintptr_t>(cuda_device(device).allocate_host(nbytes));
      },
      "device"_a, "nbytes"_a, ReleaseGil(),
      "Pinned memory of the driver, for every device of the process. Returns the address.");
  module.def(
      "free_host",
      [](int device, uintptr_t address) { cuda_device(device).free_host(at(address)); }, "device"_a,
      "address"_a, ReleaseGil());
  module.def(
      "pinned_until", [](int device, uint64_t address) { return pinned_until(device, address); },
      "device"_a, "address"_a, ReleaseGil(),
      "Where the pinned piece that contains the address ends, says the driver; 0 if it is not "
      "pinned.");
  module.def("pci_address", pci_address, "device"_a, ReleaseGil(),
             "Where a GPU is, as in /sys/bus/pci/devices: 0000:18:00.0.");

  module.def(
      "map_host",
      [](int fd, uint64_t nbytes) { return reinterpret_cast<uintptr_t>(map_host(fd, nbytes)); },
      "fd"_a, "nbytes"_a, ReleaseGil(), "See host_memory.h. Returns the address.");
  module.def(
      "unmap_host", [](uintptr_t address, uint64_t nbytes) { unmap_host(at(address), nbytes); },
      "address"_a, "nbytes"_a, ReleaseGil());
  module.def(
      "bind_host",
      [](uintptr_t address, uint64_t nbytes, int node) {
        return bind_host(at(address), nbytes, node);
      },
      "address"_a, "nbytes"_a, "node"_a);
  module.def(
      "touch_host",
      [](uintptr_t address, uint64_t nbytes, int threads, bool collapse,
         nb::typed<nb::list, int> cpus) {
        const Touch how{threads, collapse, items_of<int>(cpus)};
        without_gil([&] { touch_host(at(address), nbytes, how); });
      },
      "address"_a, "nbytes"_a, "threads"_a, "collapse"_a, "cpus"_a);

  module.def("register_cuda_ops", register_cuda_ops, "For a PyTorch with CUDA; once in a process.");

  // Both take what the op _watch_cache returns, and hold the GIL: no tensor changes meanwhile.
  module.def("cache_has_moved", cache_has_moved, "watched"_a);
  module.def("release_cache", release_cache, "watched"_a);
}

}  // namespace kvswap::bindings
