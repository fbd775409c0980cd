#include "handler.h"

#include <algorithm>
#include <functional>

#include "../cuda_context.h"
#include "../cuda_stream.h"
#include "clock.h"

namespace kvswap {
namespace {

void refuse_capture(const cuda::StreamRef& stream, const char* noun) {
  KVSWAP_CHECK(
      !cuda::is_capturing(stream), noun,
      " is capturing a CUDA graph: a replay would neither copy nor wait; call this outside "
      "of the capture");
}

}  // namespace

Handler::Handler(std::vector<Group> groups, int64_t layers, int device, bool threaded,
                 const kvswap_path_options& options)
    : dispatcher_(std::move(groups), layers, device, threaded, options),
      reader_(dispatcher_.groups) {}

Handler::~Handler() { std::for_each(gates_.begin(), gates_.end(), Gate::release); }

void Handler::check_open() const {
  KVSWAP_CHECK(!closed_, "the handler is closed; make a new one");
  KVSWAP_CHECK(dispatcher_.lost().empty(), dispatcher_.lost());
}

JobRef Handler::submit(const kvswap_request& request) {
  Lock lock(dispatcher_.mutex);
  check_open();
  JobRef job = reader_.read(request);
  if (device() >= 0 && request.after_kind <= KVSWAP_AFTER_STREAM) {
    refuse_capture(stream_of(request), "the stream that the job would start behind");
  }
  if (request.gate != nullptr) close_gate(lock, request);
  job->id = last_id_ + 1;
  job->gate = static_cast<Gate*>(request.gate);
  job->submitted_at = now();
  dispatcher_.planner.plan(*job);
  std::string error;
  try {
    job->after = moment(*dispatcher_.channels[job->channel], request);
  } catch (const std::exception& problem) {
    error = problem.what();
    dispatcher_.check_alive(error);
  }
  dispatcher_.hazards.order(*job);
  const std::string doomed = dispatcher_.ledger.enter(job);
  last_id_ = job->id;
  dispatcher_.hazards.note(*job);
  if (!error.empty() || !doomed.empty()) {
    dispatcher_.abandon(job, State::kFailed, error.empty() ? doomed : error);
  } else {
    job->submit_seconds = now() - request.began;  // another thread may see it end at once
    dispatcher_.dispatch(lock, job);
    // A graph that waits for the gate may not be launched before the load is on the device: if a
    // kernel is loaded meanwhile, the driver puts all later work behind that graph.
    if (job->gate != nullptr || device() < 0) dispatcher_.flush(lock, job);
  }
  job->submit_seconds = now() - request.began;
  observe(dispatcher_.ledger.metrics(job->channel).submit, job->submit_seconds);
  return job;
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

void Handler::close_gate(Lock& lock, const kvswap_request& request) {
  Gate* gate = static_cast<Gate*>(request.gate);
  const cuda::StreamRef stream = cuda::current_stream(device());
  refuse_capture(stream, "the stream on which the gate is to be closed");
  dispatcher_.progress.wait(lock, [&] { return !gate->busy; });
  check_open();
  gate->close(stream);
  gate->busy = true;
}

bool Handler::has_ended(const Job* job) {
  const Lock lock(dispatcher_.mutex);
  if (!job->ended()) dispatcher_.advance();
  return job->ended();
}

bool Handler::cancel(Job* job) {
  const Lock lock(dispatcher_.mutex);
  return dispatcher_.cancel(JobRef(job));
}

void Handler::wait_on(Job* job, int layer_group, const cuda::StreamRef& stream) {
  const JobRef held(job);
  Lock lock(dispatcher_.mutex);
  dispatcher_.advance();
  try {
    // Whether or not the job has ended: that is a matter of timing.
    if (dispatcher_.lost().empty()) refuse_capture(stream, "the stream that is to wait");
  } catch (const std::exception& error) {
    dispatcher_.check_alive(error.what());
    if (dispatcher_.lost().empty()) throw;
  }
  if (!job->ended()) dispatcher_.flush(lock, held);
  if (job->ended()) return;
  const std::vector<cuda::Event>& ends = job->transfer->ends;
  const cuda::Event end = layer_group < 0 ? ends.back() : ends.at(layer_group);
  cuda::wait_event(stream, end);
}

void Handler::rebind(std::vector<Group> groups) {
  const Lock lock(dispatcher_.mutex);
  check_open();
  KVSWAP_CHECK(dispatcher_.ledger.all_ended_until(last_id_),
               "another thread has submitted a job while the cache was about to be rebound; let it "
               "wait until rebind() has returned");
  dispatcher_.rebind(std::move(groups));
  reader_ = RequestReader(dispatcher_.groups);
}

Gate* Handler::make_gate(int parts) {
  const Lock lock(dispatcher_.mutex);
  check_open();
  const auto is_over = [](Gate* gate) { return gate->is_dropped() && !gate->busy; };
  const auto over = std::stable_partition(gates_.begin(), gates_.end(), std::not_fn(is_over));
  std::for_each(over, gates_.end(), Gate::release);
  gates_.erase(over, gates_.end());
  gates_.reserve(gates_.size() + 1);
  gates_.push_back(new Gate(device(), parts, gate_words_));
  return gates_.back();
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

void Handler::lose(const std::string& error) {
  const Lock lock(dispatcher_.mutex);
  dispatcher_.check_alive(error);
}

void Handler::close() {
  Lock lock(dispatcher_.mutex);
  closed_ = true;
  for (const double began = now();;) {
    dispatcher_.advance();
    if (stopping_ || dispatcher_.has_nothing_left(last_id_)) break;
    lock.unlock();
    pause_since(began);
    lock.lock();
  }
  if (std::exchange(stopping_, true)) {  // another thread does it
    dispatcher_.progress.wait(lock, [&] { return stopped_; });
    return;
  }
  dispatcher_.progress.wait(lock, [&] { return looking_ == 0; });
  dispatcher_.stop(lock);
  stopped_ = true;
  dispatcher_.progress.notify_all();
}

}  // namespace kvswap
