#include "device/host.h"

#include <chrono>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <mutex>
#include <new>
#include <utility>

#include "environment.h"

namespace kvswap {
namespace {

struct LateStream {
  std::deque<std::function<void()>> items;  // that have not run
  uint64_t num_given = 0, num_run = 0;      // items
};

struct HostEvent {
  std::chrono::steady_clock::time_point time;
  bool has_happened = true;
  std::exception_ptr error;      // of a late copy of the transfer that starts with this event
  LateStream* stream = nullptr;  // the late stream that records it
  uint64_t item = 0;             // the number of items of that stream until then
};

void copy_parts(const std::vector<PartCopy>& parts) {
  for (const PartCopy& part : parts) part.encoding->copy_on_host(part);
}

// What late streams were given and have not done. Any thread may call.
class LateWork {
 public:
  LateStream* create_stream() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return &streams_.emplace_back();
  }
  void destroy_stream(const LateStream* stream) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    streams_.remove_if([&](const LateStream& other) { return &other == stream; });
  }
  // The parts, what they point to, and the start stay valid until the end of the transfer.
  void add_copies(LateStream& stream, const std::vector<PartCopy>& parts, HostEvent& start) {
    const std::lock_guard<std::mutex> lock(mutex_);
    add(stream, [parts, &start] {
      try {
        copy_parts(parts);
      } catch (...) {
        start.error = std::current_exception();
      }
    });
  }
  void add_record(LateStream& stream, HostEvent& event) {
    const std::lock_guard<std::mutex> lock(mutex_);
    add(stream, [&event] {
      event.time = std::chrono::steady_clock::now();
      event.has_happened = true;
    });
    event.has_happened = false;
    event.error = nullptr;
    event.stream = &stream;
    event.item = stream.num_given;
  }
  void add_wait(LateStream& stream, const HostEvent& event) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (event.has_happened) return;
    add(stream, [&other = *event.stream, until = event.item] { run(other, until); });
  }
  bool has_happened(const HostEvent& event) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return event.has_happened;
  }
  // Does the work before this event in its stream, and what that waits for in others. Returns
  // whether there was any, as does run_all().
  bool run_until(const HostEvent& event) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (event.has_happened) return false;
    run(*event.stream, event.item);
    return true;
  }
  bool run_all() noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    bool has_run = false;
    for (LateStream& stream : streams_) {
      has_run |= !stream.items.empty();
      run(stream, stream.num_given);
    }
    return has_run;
  }

 private:
  static void add(LateStream& stream, std::function<void()> item) {
    stream.items.push_back(std::move(item));
    ++stream.num_given;
  }
  // Runs the stream's first `until` items, as far as they have not run.
  static void run(LateStream& stream, uint64_t until) noexcept {
    while (stream.num_run < until) {
      ++stream.num_run;  // first: what this item waits for may wait for earlier ones
      stream.items.front()();
      stream.items.pop_front();
    }
  }

  std::mutex mutex_;
  std::list<LateStream> streams_;
};

class HostCopier : public Copier {
 public:
  // stream: null where copies are not late.
  HostCopier(LateWork& late, LateStream* stream) : late_(late), stream_(stream) {}

  Stream copy(const std::vector<PartCopy>& parts, Event start, bool, CopyPosition& next,
              uint64_t&) override {
    if (stream_ == nullptr) {
      copy_parts(parts);
    } else {
      late_.add_copies(*stream_, parts, *static_cast<HostEvent*>(start));
    }
    next.part = parts.size();
    return stream_;
  }
  bool synchronize() noexcept override {
    if (stream_ != nullptr) late_.run_all();
    return true;
  }

 private:
  LateWork& late_;
  LateStream* const stream_;
};

class HostDevice : public Device {
 public:
  HostDevice() : Device(-1) {}

  std::string name() const override { return "host memory"; }
  bool is_synchronous() const override { return true; }
  bool catch_up(Event until) noexcept override {
    return until == nullptr ? late_.run_all() : late_.run_until(*static_cast<HostEvent*>(until));
  }

  Stream create_stream() override { return cpu_is_late() ? late_.create_stream() : nullptr; }
  void destroy_stream(Stream stream) noexcept override {
    late_.destroy_stream(static_cast<LateStream*>(stream));
  }
  bool is_idle(Stream) override { return true; }
  bool is_alive(Stream) noexcept override { return true; }
  void wait_event(const StreamRef&, Event event) override {
    late_.run_until(*static_cast<HostEvent*>(event));
  }

  Event create_event(bool) override { return new HostEvent; }
  void destroy_event(Event event) noexcept override { delete static_cast<HostEvent*>(event); }
  void record_event(Event event, Stream stream, const char*) override {
    HostEvent& recorded = *static_cast<HostEvent*>(event);
    if (stream != nullptr) return late_.add_record(*static_cast<LateStream*>(stream), recorded);
    recorded.time = std::chrono::steady_clock::now();
  }
  void wait_event(Stream stream, Event event, const char*) override {
    if (stream == nullptr) return;
    late_.add_wait(*static_cast<LateStream*>(stream), *static_cast<HostEvent*>(event));
  }
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
    return std::make_unique<HostCopier>(late_, static_cast<LateStream*>(copies));
  }

 private:
  LateWork late_;
};

}  // namespace

std::unique_ptr<Device> make_host_device() { return std::make_unique<HostDevice>(); }

}  // namespace kvswap
