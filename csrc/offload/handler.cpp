#include "offload/handler.h"

#include <algorithm>
#include <chrono>
#include <functional>

#include "cuda/context.h"
#include "cuda/stream.h"
#include "offload/clock.h"

namespace kvswap {
namespace {

void refuse_capture(const cuda::StreamRef& stream, const char* noun) {
  KVSWAP_CHECK(
      !cuda::is_capturing(stream), noun,
      " is capturing a CUDA graph: a replay would neither copy nor wait; call this outside "
      "of the capture");
}

// So long, in seconds, it looks for one end without the lock. Then others may have ended, too, and
// make room for what is queued.
constexpr double kLook = 50e-6;

}  // namespace

Handler::Handler(std::vector<Group> groups, int64_t layers, int device, bool threaded,
                 const kvswap_path_options& options)
    : dispatcher_(std::move(groups), layers, device, threaded, options),
      reader_(dispatcher_.groups) {}

Handler::~Handler() {
  std::for_each(dispatcher_.gates.begin(), dispatcher_.gates.end(), Gate::release);
}

void Handler::check_open() const {
  KVSWAP_CHECK(!closed_, "the handler is closed; make a new one");
  KVSWAP_CHECK(dispatcher_.lost().empty(), dispatcher_.lost().c_str());
}

JobRef Handler::submit(const kvswap_request& request) {
  Lock lock(dispatcher_.mutex);
  check_open();
  refuse_captures(request);
  Gate* gate = static_cast<Gate*>(request.gate);
  if (gate != nullptr) wait_for_gate(lock, *gate);
  // From here on the lock is held until the job is entered: its ids stay right, and the gate free.
  JobRef job = reader_.read(request, dispatcher_.groups);
  job->work->submitted_at = now();
  dispatcher_.planner.plan(*job);
  dispatcher_.hazards.order(*job);
  Reason doomed = dispatcher_.ledger.prepare(*job);
  if (doomed.empty()) doomed = take_moment(*job, request);
  if (doomed.empty() && gate != nullptr) close_gate(*job, *gate);
  // Nothing below throws: there is a job, and it ends.
  dispatcher_.ledger.enter(job);
  dispatcher_.hazards.note(*job);
  if (!doomed.empty()) {
    dispatcher_.abandon(*job, State::kFailed, doomed);
  } else {
    job->submit_seconds = now() - request.began;  // another thread may see it end at once
    dispatcher_.dispatch(lock, job);
    // A graph that waits for the gate may not be launched before the load is on the device: if a
    // kernel is loaded meanwhile, the driver puts all later work behind that graph.
    if (gate != nullptr || device() < 0) dispatcher_.flush(lock, *job);
  }
  job->submit_seconds = now() - request.began;
  observe(dispatcher_.ledger.metrics(job->channel).submit, job->submit_seconds);
  return job;
}

void Handler::refuse_captures(const kvswap_request& request) const {
  if (device() < 0) return;
  if (request.after_kind <= KVSWAP_AFTER_STREAM) {
    refuse_capture(stream_of(request), "the stream that the job would start behind");
  }
  if (request.gate != nullptr) {
    refuse_capture(cuda::current_stream(device()), "the stream on which the gate is to be closed");
  }
}

void Handler::wait_for_gate(Lock& lock, const Gate& gate) {
  while (gate.is_busy()) {
    dispatcher_.advance();  // tries to open it, if it should be open
    check_open();
    KVSWAP_CHECK(gate.problem().empty(),
                 "an earlier load has failed, and the driver does not open its gate again: ",
                 gate.problem().c_str());
    if (gate.is_busy()) dispatcher_.progress.wait(lock);
    check_open();
  }
}

// What the job starts behind. Returns why it cannot be had, or none.
Reason Handler::take_moment(Job& job, const kvswap_request& request) {
  try {
    job.work->after = moment(*dispatcher_.channels[job.channel], request);
    return {};
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    const Reason reason(error);
    dispatcher_.check_alive(reason);
    return reason;
  }
}

void Handler::close_gate(Job& job, Gate& gate) {
  try {
    gate.close(cuda::current_stream(device()));
  } catch (...) {
    dispatcher_.channels[job.channel]->give_moment(job.work->after);
    throw;
  }
  job.work->gate = &gate;
}

Moment* Handler::moment(Channel& channel, const kvswap_request& request) {
  if (device() < 0 || request.after_kind == KVSWAP_AFTER_NOTHING) return nullptr;
  if (request.after_kind == KVSWAP_AFTER_EVENT) return channel.moment_of_event(request.after);
  return channel.moment_of_stream(stream_of(request).handle);
}

cuda::StreamRef Handler::stream_of(const kvswap_request& request) const {
  const bool is_given = request.after_kind == KVSWAP_AFTER_STREAM;
  return is_given ? cuda::StreamRef{device(), request.after} : cuda::current_stream(device());
}

bool Handler::has_ended(const Job* job) {
  const Lock lock(dispatcher_.mutex);
  if (!job->ended()) dispatcher_.advance();
  return job->ended();
}

bool Handler::cancel(Job* job) {
  const Lock lock(dispatcher_.mutex);
  return dispatcher_.cancel(*job);
}

void Handler::wait_on(Job* job, int layer_group, const cuda::StreamRef& stream) {
  Lock lock(dispatcher_.mutex);
  dispatcher_.advance();
  try {
    // Whether or not the job has ended: that is a matter of timing.
    if (dispatcher_.lost().empty()) refuse_capture(stream, "the stream that is to wait");
  } catch (const std::exception& error) {
    dispatcher_.check_alive(Reason(error));
    if (dispatcher_.lost().empty()) throw;
  }
  if (!job->ended()) dispatcher_.flush(lock, *job);
  if (job->ended()) return;
  const std::vector<cuda::Event>& ends = job->work->transfer->ends;
  const cuda::Event end = layer_group < 0 ? ends.back() : ends.at(layer_group);
  cuda::wait_event(stream, end);
}

void Handler::rebind(std::vector<Group> groups) {
  const Lock lock(dispatcher_.mutex);
  check_open();
  KVSWAP_CHECK(dispatcher_.ledger.all_ended_until(dispatcher_.ledger.last_id()),
               "another thread has submitted a job while the cache was about to be rebound; let it "
               "wait until rebind() has returned");
  RequestReader reader(groups);
  dispatcher_.rebind(std::move(groups));
  reader_ = std::move(reader);
}

Gate* Handler::make_gate(int parts) {
  const Lock lock(dispatcher_.mutex);
  check_open();
  std::vector<Gate*>& gates = dispatcher_.gates;
  const auto is_over = [](Gate* gate) { return gate->is_dropped() && !gate->is_busy(); };
  const auto over = std::stable_partition(gates.begin(), gates.end(), std::not_fn(is_over));
  std::for_each(over, gates.end(), Gate::release);
  gates.erase(over, gates.end());
  make_room(gates, gates.size());
  gates.push_back(new Gate(device(), parts, gate_words_));
  return gates.back();
}

kvswap_metrics Handler::metrics(int number) {
  const Lock lock(dispatcher_.mutex);
  dispatcher_.advance();
  const Channel& channel = *dispatcher_.channels[number];
  kvswap_metrics metrics = dispatcher_.ledger.metrics(number);
  metrics.queued = channel.waiting;
  for (const auto& transfer : channel.running) metrics.running += transfer->jobs.size();
  metrics.streams = channel.streams();
  metrics.events = channel.events();
  return metrics;
}

void Handler::lose(const Reason& error) {
  const Lock lock(dispatcher_.mutex);
  dispatcher_.check_alive(error);
}

bool Handler::close(double seconds) {
  const double began = now();
  Lock lock(dispatcher_.mutex);
  closed_ = true;
  dispatcher_.progress.notify_all();  // who waits to submit is told
  for (;;) {
    dispatcher_.advance();
    if (stopping_ || dispatcher_.has_nothing_left()) break;
    if (now() - began >= seconds) return false;
    lock.unlock();
    pause_since(began);
    lock.lock();
  }
  if (std::exchange(stopping_, true)) {  // another thread does it
    const auto left = std::chrono::duration<double>(seconds - (now() - began));
    return dispatcher_.progress.wait_for(lock, left, [&] { return stopped_; });
  }
  dispatcher_.progress.wait(lock, [&] { return looking_ == 0; });
  dispatcher_.stop(lock);
  stopped_ = true;
  dispatcher_.progress.notify_all();
  return true;
}

// How a thread waits on the host for jobs to end.

int Handler::wait(const std::vector<Job*>& jobs, bool for_all, double seconds) {
  const double began = now();
  size_t ended = 0;
  bool failed = false;
  Lock lock(dispatcher_.mutex);
  for (const int64_t last = dispatcher_.ledger.last_id();;) {
    dispatcher_.advance();
    for (; ended < jobs.size() && jobs[ended]->ended(); ++ended) {
      failed |= jobs[ended]->state != State::kDone;
    }
    if (for_all ? dispatcher_.ledger.all_ended_until(last) : ended == jobs.size()) {
      return failed || (for_all && dispatcher_.ledger.has_failures()) ? 2 : 1;
    }
    const double left = seconds - (now() - began);
    if (left <= 0) return 0;
    const Job& next = for_all ? dispatcher_.ledger.oldest() : *jobs[ended];
    if (dispatcher_.help(lock, left)) continue;
    look_for_end(lock, next.work->transfer, began);
  }
}

void Handler::look_for_end(Lock& lock, std::shared_ptr<Transfer> transfer, double began) {
  if (!transfer) {  // queued, or about to be enqueued by another thread
    const double pause = std::clamp((now() - began) / 100, kLook, 1e-3);
    dispatcher_.progress.wait_for(lock, std::chrono::duration<double>(pause));
    return;
  }
  ++looking_;
  lock.unlock();
  cuda::Result state = cuda::kNotReady;
  try {
    const cuda::ContextGuard context(device());
    const double until = now() + kLook;
    do {
      pause_since(began);
      state = cuda::driver().query_event(transfer->ends.back());
    } while (state == cuda::kNotReady && now() < until);
  } catch (const std::exception&) {  // whoever asks next with the lock finds the device lost, too
  }
  lock.lock();
  transfer->end_seen |= state == cuda::kSuccess;
  transfer.reset();
  if (--looking_ == 0 && closed_) dispatcher_.progress.notify_all();
}

}  // namespace kvswap
