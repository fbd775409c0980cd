#include "device/host.h"

#include <chrono>

#include "copy/address_map.h"

namespace kvswap {
namespace {

using Time = std::chrono::steady_clock::time_point;

class HostCopier : public Copier {
 public:
  Stream copy(const std::vector<PartCopy>& parts, Event, bool, CopyPosition& next,
              uint64_t&) override {
    for (const PartCopy& part : parts) part.encoding->copy_on_host(part);
    next.part = parts.size();
    return nullptr;
  }
  bool synchronize() noexcept override { return true; }
};

class HostDevice : public Device {
 public:
  HostDevice() : Device(-1) {}

  std::string name() const override { return "host memory"; }
  bool is_synchronous() const override { return true; }

  Stream create_stream() override { return nullptr; }
  void destroy_stream(Stream) noexcept override {}
  bool is_idle(Stream) override { return true; }
  bool is_alive(Stream) noexcept override { return true; }
  StreamRef current_stream() const override { return {index(), nullptr}; }
  void wait_event(const StreamRef&, Event) override {}

  Event create_event(bool) override { return new Time; }
  void destroy_event(Event event) noexcept override { delete static_cast<Time*>(event); }
  void record_event(Event event, Stream, const char*) override {
    *static_cast<Time*>(event) = std::chrono::steady_clock::now();
  }
  void wait_event(Stream, Event, const char*) override {}
  bool has_happened(Event) override { return true; }
  double seconds_between(Event start, Event end) override {
    const std::chrono::duration<double> passed =
        *static_cast<Time*>(end) - *static_cast<Time*>(start);
    return passed.count();
  }

  // By whatever CUDA device this process uses.
  bool is_pinned(const void* address) override {
    return AddressMap().find(reinterpret_cast<uint64_t>(address)).kind == MemoryKind::kPinned;
  }

  const std::vector<CopyMethod>& copy_methods() const override {
    static const std::vector<CopyMethod> methods{CopyMethod::kHost};
    return methods;
  }
  std::unique_ptr<Copier> make_copier(Stream, bool) override {
    return std::make_unique<HostCopier>();
  }
};

}  // namespace

std::unique_ptr<Device> make_host_device() { return std::make_unique<HostDevice>(); }

}  // namespace kvswap
