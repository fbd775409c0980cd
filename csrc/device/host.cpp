#include "device/host.h"

#include <chrono>
#include <deque>
#include <exception>
#include <mutex>
#include <new>

#include "environment.h"

namespace kvswap {
namespace {

struct HostEvent {
  std::chrono::steady_clock::time_point time;
  bool has_happened = true;
  std::exception_ptr error;  // of a late copy of the transfer that starts with this event
};

void copy_parts(const std::vector<PartCopy>& parts) {
  for (const PartCopy& part : parts) part.encoding->copy_on_host(part);
}

// What late streams were given and have not done. Any thread may call.
class LateWork {
 public:
  // The parts, what they point to, and the start stay valid until the end of the transfer.
  void add_copies(const std::vector<PartCopy>& parts, HostEvent& start) {
    const std::lock_guard<std::mutex> lock(mutex_);
    items_.push_back({parts, &start, false});
  }
  void add_record(HostEvent& event) {
    const std::lock_guard<std::mutex> lock(mutex_);
    items_.push_back({{}, &event, true});
    event.has_happened = false;
    event.error = nullptr;
  }
  bool has_happened(const HostEvent& event) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return event.has_happened;
  }
  // Does the work up to this event; null: all. Returns whether there was any.
  bool run_until(const HostEvent* event) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    bool has_run = false;
    for (; !items_.empty() && !(event != nullptr && event->has_happened); has_run = true) {
      run(items_.front());
      items_.pop_front();
    }
    return has_run;
  }

 private:
  struct Item {
    std::vector<PartCopy> parts;
    HostEvent* event;  // to be recorded, or the start of the transfer whose parts are copied
    bool is_record;
  };

  void run(const Item& item) noexcept {
    if (item.is_record) {
      item.event->time = std::chrono::steady_clock::now();
      item.event->has_happened = true;
      return;
    }
    try {
      copy_parts(item.parts);
    } catch (...) {
      item.event->error = std::current_exception();
    }
  }

  std::mutex mutex_;
  std::deque<Item> items_;
};

class HostCopier : public Copier {
 public:
  // late: null where copies are not late.
  explicit HostCopier(LateWork* late) : late_(late) {}

  Stream copy(const std::vector<PartCopy>& parts, Event start, bool, CopyPosition& next,
              uint64_t&) override {
    if (late_ == nullptr) {
      copy_parts(parts);
    } else {
      late_->add_copies(parts, *static_cast<HostEvent*>(start));
    }
    next.part = parts.size();
    return late_;
  }
  bool synchronize() noexcept override {
    if (late_ != nullptr) late_->run_until(nullptr);
    return true;
  }

 private:
  LateWork* const late_;
};

class HostDevice : public Device {
 public:
  HostDevice() : Device(-1) {}

  std::string name() const override { return "host memory"; }
  bool is_synchronous() const override { return true; }
  bool catch_up() noexcept override { return late_.run_until(nullptr); }

  Stream create_stream() override { return cpu_is_late() ? &late_ : nullptr; }
  void destroy_stream(Stream) noexcept override {}
  bool is_idle(Stream) override { return true; }
  bool is_alive(Stream) noexcept override { return true; }
  void wait_event(const StreamRef&, Event event) override {
    late_.run_until(static_cast<HostEvent*>(event));
  }

  Event create_event(bool) override { return new HostEvent; }
  void destroy_event(Event event) noexcept override { delete static_cast<HostEvent*>(event); }
  void record_event(Event event, Stream stream, const char*) override {
    HostEvent& recorded = *static_cast<HostEvent*>(event);
    if (stream != nullptr) return late_.add_record(recorded);
    recorded.time = std::chrono::steady_clock::now();
  }
  // The list of late work is in the order of submission.
  void wait_event(Stream, Event, const char*) override {}
  bool has_happened(Event event) override {
    return late_.has_happened(*static_cast<HostEvent*>(event));
  }
  // Throws what a late copy has thrown.
  double seconds_between(Event start, Event end) override {
    const HostEvent &first = *static_cast<HostEvent*>(start), &last = *static_cast<HostEvent*>(end);
    if (first.error != nullptr) std::rethrow_exception(first.error);
    const std::chrono::duration<double> passed = last.time - first.time;
    return passed.count();
  }

  void* allocate_host(uint64_t bytes) override { return operator new(bytes); }
  void free_host(void* address) override { operator delete(address); }

  const std::vector<CopyMethod>& copy_methods() const override {
    static const std::vector<CopyMethod> methods{CopyMethod::kHost};
    return methods;
  }
  std::unique_ptr<Copier> make_copier(Stream copies, bool) override {
    return std::make_unique<HostCopier>(static_cast<LateWork*>(copies));
  }

 private:
  LateWork late_;
};

}  // namespace

std::unique_ptr<Device> make_host_device() { return std::make_unique<HostDevice>(); }

}  // namespace kvswap
