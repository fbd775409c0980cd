// Stands in for libcuda.so.1: a CUDA driver for machines without one, and what tests ask of it.
#include <cstdlib>
#include <utility>
#include <vector>

#include "calls.h"

using stub::device;

namespace {

const stub::Functions& functions() {
  static const auto& all = *new stub::Functions([] {
    stub::Functions merged;
    for (auto part : {stub::context_calls(), stub::memory_calls(), stub::copy_calls(),
                      stub::kernel_calls(), stub::stream_calls(), stub::event_calls()}) {
      merged.merge(part);
    }
    return merged;
  }());
  return all;
}

// STUB_WITHOUT names functions that this driver does not have, with commas between them.
bool is_left_out(const std::string& name) {
  const char* missing = std::getenv("STUB_WITHOUT");
  return missing && ("," + std::string(missing) + ",").find("," + name + ",") != std::string::npos;
}

std::vector<std::shared_ptr<bool>> holds;

// A call of the test: it has the lock, and the context that the test has chosen.
struct Lock {
  explicit Lock(std::mutex& mutex) : guard(mutex), context(device().test_context) {}

  std::lock_guard<std::mutex> guard;
  stub::InContext context;
};

const char* keep(std::string text) {
  thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

}  // namespace

extern "C" {

int cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int*) {
  const auto found = functions().find(name);
  if (found == functions().end() || is_left_out(name)) return stub::kNotFound;
  return *function = found->second, stub::kSuccess;
}

void stub_reset() {
  device().set_mode(stub::Mode::kManual, 0);  // immediate would run what is to be dropped
  const Lock lock(device().mutex);
  device().reset();
  holds.clear();
  stub::capture_mode = 0;
}
void stub_set_mode(int mode, unsigned seed) {
  device().set_mode(static_cast<stub::Mode>(mode), seed);
}
bool stub_join(int milliseconds) { return device().join(milliseconds); }

int stub_run() {
  const Lock lock(device().mutex);
  return device().run();
}
int stub_run_stream(uint64_t handle) {
  const Lock lock(device().mutex);
  const auto stream = device().stream(handle);
  return stream ? device().run(*stream) : 0;
}
bool stub_step(uint64_t handle) {
  const Lock lock(device().mutex);
  const auto stream = device().stream(handle);
  return stream && device().step(*stream);
}
int stub_hold(uint64_t handle) {
  const Lock lock(device().mutex);
  const auto stream = device().stream(handle);
  if (stream == nullptr) return -1;
  holds.push_back(device().hold(*stream));
  return static_cast<int>(holds.size()) - 1;
}
void stub_release(int number) {
  const Lock lock(device().mutex);
  *holds.at(number) = true;
  device().settle();
  device().changed.notify_all();
}
const char* stub_pending() {
  const Lock lock(device().mutex);
  return keep(device().pending());
}
void stub_advance_clock(double milliseconds) {
  const Lock lock(device().mutex);
  device().clock += milliseconds;
}
void stub_set_patience(int milliseconds) {
  const Lock lock(device().mutex);
  device().set_patience(milliseconds);
}

void stub_add(uint64_t address, uint64_t bytes, unsigned type, int ordinal) {
  const Lock lock(device().mutex);
  device().memory.add({address, address + bytes, type, ordinal, stub::Range::kAdopted});
}

void stub_fail(const char* name, int nth, int code) {
  const Lock lock(device().mutex);
  device().faults.fail(name, nth, code);
}
void stub_fail_copy(int index) {
  const Lock lock(device().mutex);
  device().faults.fail_copy(index);
}
void stub_lose(int code) {
  const Lock lock(device().mutex);
  device().lose(code);
}
int stub_calls(const char* name) {
  const Lock lock(device().mutex);
  return device().faults.calls(name);
}
int stub_calls_here(const char* name) {
  const Lock lock(device().mutex);
  return device().faults.calls_here(name);
}
bool stub_knows(const char* name) { return functions().count(name) > 0; }

// In which context the test calls; returns the one before.
int stub_set_context(int ordinal) {
  const Lock lock(device().mutex);
  return std::exchange(device().test_context, ordinal);
}
// Around a call that the test makes of the driver.
void stub_enter() {
  const std::lock_guard<std::mutex> lock(device().mutex);
  stub::contexts.push_back(device().test_context);
}
void stub_leave() { stub::contexts.pop_back(); }
// A stream of the test's own numbering, in the context of a device.
void stub_unmap(uint64_t begin, uint64_t bytes) {
  const Lock lock(device().mutex);
  device().memory.unmap(begin, bytes);
}
void stub_adopt_stream(uint64_t handle, int ordinal) {
  const Lock lock(device().mutex);
  const stub::InContext context(ordinal);
  device().stream(handle);
}

void stub_set_initialized(int value) {
  const Lock lock(device().mutex);
  device().initialized = value;
}
void stub_set_attribute(int attribute, int value) {
  const Lock lock(device().mutex);
  device().attributes[attribute] = value;
}
void stub_limit_registration(uint64_t in_one, uint64_t in_all) {
  const Lock lock(device().mutex);
  device().memory.most_in_one = in_one;
  device().memory.most_in_all = in_all;
}
void stub_set_capturing(int value) {
  const Lock lock(device().mutex);
  device().set_capturing(value);
}
void stub_set_stream_capturing(uint64_t handle, int value) {
  const Lock lock(device().mutex);
  if (const auto stream = device().stream(handle)) stream->capturing = value;
}
void stub_replay(uint64_t captured, uint64_t stream) {
  const Lock lock(device().mutex);
  for (const auto& operation : device().stream(captured)->graph) {
    device().stream(stream)->push(operation);
  }
  device().settle();
  device().changed.notify_all();
}
void stub_set_global_capture(int value) {
  const Lock lock(device().mutex);
  device().global_capture = value;
}
int stub_capture_spoilt() {
  const Lock lock(device().mutex);
  return device().capture_spoilt;
}

int stub_live_events() {
  const Lock lock(device().mutex);
  return device().live_events();
}
int stub_live_allocations() {
  const Lock lock(device().mutex);
  return device().memory.allocations();
}
int stub_live_streams() {
  const Lock lock(device().mutex);
  return device().live_streams();
}
const char* stub_violations() {
  const Lock lock(device().mutex);
  std::string lines;
  for (const std::string& line : device().log.violations()) lines += line + "\n";
  return keep(lines);
}
const char* stub_take_log() {
  const Lock lock(device().mutex);
  return keep(device().log.take());
}
}
