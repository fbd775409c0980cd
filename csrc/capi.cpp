#include "capi.h"

#include <optional>

#include "c_error.h"
#include "copy/address_map.h"
#include "cuda/context.h"
#include "cuda/driver.h"
#include "environment.h"
#include "host_memory.h"

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

int kvswap_host_is_pinned(int device, const void* address) {
  int pinned = -1;
  succeeds([&] {
    std::optional<kvswap::cuda::ContextGuard> context;
    if (device >= 0) context.emplace(device);
    const auto memory = kvswap::AddressMap().find(reinterpret_cast<uint64_t>(address));
    pinned = memory.kind == kvswap::MemoryKind::kPinned;
  });
  return pinned;
}

bool kvswap_device_pci_address(int device, int32_t* numbers) {
  return succeeds([&] {
    for (const int attribute :
         {kvswap::cuda::kPciDomain, kvswap::cuda::kPciBus, kvswap::cuda::kPciDevice}) {
      KVSWAP_DRIVER_CHECK(kvswap::cuda::driver().get_device_attribute(numbers++, attribute, device),
                          "cuDeviceGetAttribute of CUDA device ", device);
    }
  });
}

void* kvswap_host_map(int fd, uint64_t bytes, uint64_t alignment, bool transparent) {
  void* address = nullptr;
  succeeds([&] { address = kvswap::map_host(fd, bytes, alignment, transparent); });
  return address;
}

void kvswap_host_unmap(void* address, uint64_t bytes) { kvswap::unmap_host(address, bytes); }

bool kvswap_host_bind(void* address, uint64_t bytes, int node) {
  return kvswap::bind_host(address, bytes, node);
}

bool kvswap_host_touch(void* address, uint64_t bytes, int threads, bool collapse,
                       const int32_t* cpus, int cpu_count) {
  return succeeds(
      [&] { kvswap::touch_host(address, bytes, {threads, collapse, cpus, cpu_count}); });
}

void kvswap_usable_pages_publish(kvswap_usable_pages* usable, int64_t last_page,
                                 int64_t chunk_blocks) {
  __atomic_store_n(&usable->chunk_blocks, chunk_blocks, __ATOMIC_RELAXED);
  __atomic_store_n(&usable->last_page, last_page, __ATOMIC_RELEASE);
}

const char* kvswap_last_error() { return kvswap::last_error(); }
const char* kvswap_last_error_type() { return kvswap::last_error_type(); }
