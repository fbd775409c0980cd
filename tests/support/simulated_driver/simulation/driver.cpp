// The functions of the simulated driver by their names, and what tests ask of it.
#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

#include "calls.h"

using simulated::device;

namespace {

const simulated::Functions& functions() {
  static const auto& all = *new simulated::Functions([] {
    simulated::Functions merged;
    for (auto part :
         {simulated::context_calls(), simulated::memory_calls(), simulated::copy_calls(),
          simulated::kernel_calls(), simulated::stream_calls(), simulated::event_calls()}) {
      merged.merge(part);
    }
    return merged;
  }());
  return all;
}

// SIMULATED_WITHOUT names functions that this driver does not have, with commas between them.
bool is_left_out(const std::string& name) {
  const char* missing = std::getenv("SIMULATED_WITHOUT");
  return missing && ("," + std::string(missing) + ",").find("," + name + ",") != std::string::npos;
}

std::vector<std::shared_ptr<bool>> holds;

// A call of the test: it has the lock, and the context that the test has chosen.
struct Lock {
  explicit Lock(std::mutex& mutex) : guard(mutex), context(device().test_context) {}

  std::lock_guard<std::mutex> guard;
  simulated::InContext context;
};

const char* keep(std::string text) {
  thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

}  // namespace

extern "C" {

// Null if there is none.
void* simulated_function(const char* name) {
  const auto found = functions().find(name);
  return found == functions().end() || is_left_out(name) ? nullptr : found->second;
}

void simulated_reset() {
  device().set_mode(simulated::Mode::kManual, 0);  // immediate would run what is to be dropped
  const Lock lock(device().mutex);
  device().reset();
  holds.clear();
  simulated::capture_mode = 0;
}
void simulated_set_mode(int mode, unsigned seed) {
  device().set_mode(static_cast<simulated::Mode>(mode), seed);
}

int simulated_run() {
  const Lock lock(device().mutex);
  return device().run();
}
int simulated_run_stream(uint64_t handle) {
  const Lock lock(device().mutex);
  const auto stream = device().stream(handle);
  return stream ? device().run(*stream) : 0;
}
bool simulated_step(uint64_t handle) {
  const Lock lock(device().mutex);
  const auto stream = device().stream(handle);
  return stream && device().step(*stream);
}
int simulated_hold(uint64_t handle) {
  const Lock lock(device().mutex);
  const auto stream = device().stream(handle);
  if (stream == nullptr) return -1;
  holds.push_back(device().hold(*stream));
  return static_cast<int>(holds.size()) - 1;
}
void simulated_release(int number) {
  const Lock lock(device().mutex);
  *holds.at(number) = true;
  device().settle();
  device().changed.notify_all();
}
const char* simulated_pending() {
  const Lock lock(device().mutex);
  return keep(device().pending());
}
void simulated_advance_clock(double milliseconds) {
  const Lock lock(device().mutex);
  device().clock += milliseconds;
}
void simulated_set_patience(int milliseconds) {
  const Lock lock(device().mutex);
  device().set_patience(milliseconds);
}

void simulated_add(uint64_t address, uint64_t bytes, unsigned type, int ordinal) {
  const Lock lock(device().mutex);
  device().memory.add({address, address + bytes, type, ordinal, simulated::Range::kAdopted});
}

int simulated_fail(const char* name, int nth, int code) {
  const Lock lock(device().mutex);
  return device().faults.fail(name, nth, code);
}
void simulated_fail_copy(int index) {
  const Lock lock(device().mutex);
  device().faults.fail_copy(index);
}
void simulated_limit_allocations(size_t bytes, int ordinal) {
  const Lock lock(device().mutex);
  device().faults.limit_allocations(bytes, ordinal);
}
void simulated_lose(int code, int ordinal, bool happens) {
  const Lock lock(device().mutex);
  device().lose(code, ordinal, happens);
}
void simulated_refuse_peers(int ordinal, int peer) {
  const Lock lock(device().mutex);
  device().unreachable.insert(std::minmax(ordinal, peer));
}
void simulated_drop_waits_between_gpus() {
  const Lock lock(device().mutex);
  device().waits_between_gpus = false;
}
void simulated_set_link(int ordinal, int other, unsigned slowness) {
  const Lock lock(device().mutex);
  device().set_link(std::minmax(ordinal, other), slowness);
}
int simulated_calls(const char* name) {
  const Lock lock(device().mutex);
  return device().faults.calls(name);
}
int simulated_calls_here(const char* name) {
  const Lock lock(device().mutex);
  return device().faults.calls_here(name);
}
bool simulated_knows(const char* name) { return functions().count(name) > 0; }

// In which context the test calls; returns the one before.
int simulated_set_context(int ordinal) {
  const Lock lock(device().mutex);
  return std::exchange(device().test_context, ordinal);
}
// Around a call that the test makes of the driver.
void simulated_enter() {
  const std::lock_guard<std::mutex> lock(device().mutex);
  simulated::contexts.push_back(device().test_context);
  simulated::is_test = true;
}
void simulated_leave() {
  simulated::contexts.pop_back();
  simulated::is_test = false;
}
// A stream of the test's own numbering, in the context of a device.
void simulated_unmap(uint64_t begin, uint64_t bytes) {
  const Lock lock(device().mutex);
  device().memory.unmap(begin, bytes);
}
void simulated_adopt_stream(uint64_t handle, int ordinal) {
  const Lock lock(device().mutex);
  const simulated::InContext context(ordinal);
  device().stream(handle);
}

void simulated_set_initialized(int value) {
  const Lock lock(device().mutex);
  device().initialized = value;
}
void simulated_set_attribute(int attribute, int value) {
  const Lock lock(device().mutex);
  device().attributes[attribute] = value;
}
void simulated_limit_registration(uint64_t in_one, uint64_t in_all) {
  const Lock lock(device().mutex);
  device().memory.most_in_one = in_one;
  device().memory.most_in_all = in_all;
}
void simulated_set_registers(int value) {
  const Lock lock(device().mutex);
  device().memory.registers = value != 0;
}
void simulated_set_capturing(int value) {
  const Lock lock(device().mutex);
  device().set_capturing(value);
}
void simulated_set_stream_capturing(uint64_t handle, int value) {
  const Lock lock(device().mutex);
  if (const auto stream = device().stream(handle)) stream->capturing = value;
}
void simulated_set_global_capture(int value) {
  const Lock lock(device().mutex);
  device().global_capture = value;
}
int simulated_capture_spoilt() {
  const Lock lock(device().mutex);
  return device().capture_spoilt;
}

int simulated_live_events() {
  const Lock lock(device().mutex);
  return device().live_events();
}
int simulated_live_allocations() {
  const Lock lock(device().mutex);
  return device().memory.allocations();
}
int simulated_live_streams() {
  const Lock lock(device().mutex);
  return device().live_streams();
}
const char* simulated_violations() {
  const Lock lock(device().mutex);
  std::string lines;
  for (const std::string& line : device().log.violations()) lines += line + "\n";
  return keep(lines);
}
const char* simulated_take_log() {
  const Lock lock(device().mutex);
  return keep(device().log.take());
}
}
