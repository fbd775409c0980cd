#include <functional>
#include <optional>

#include "c_error.h"
#include "capi.h"
#include "cuda/context.h"
#include "cuda/stream.h"
#include "offload/handler.h"

namespace {

using kvswap::Handler;
using kvswap::Job;
using kvswap::JobRef;
using kvswap::succeeds;

Handler& handler_at(void* handler) { return *static_cast<Handler*>(handler); }

// Runs the body with the context of the handler's device, if it has one. A lost device may refuse
// it; what the handler knows can be asked for all the same. What only looks at jobs needs no
// context: the driver is asked when something runs there.
template <typename Body>
bool succeeds_in(void* handler, const Body& body) {
  return succeeds([&] {
    std::optional<kvswap::cuda::ContextGuard> context;
    Handler& of = handler_at(handler);
    try {
      if (of.device() >= 0) context.emplace(of.device());
    } catch (const std::exception& error) {
      of.lose(kvswap::Reason(error));
    }
    body(of);
  });
}

std::vector<kvswap::Group> read_groups(const kvswap_group* groups, int count, int device) {
  std::vector<kvswap::Group> read;
  for (int i = 0; i < count; ++i) read.push_back(kvswap::read_group(groups[i], device));
  return read;
}

// What a job has come to, for Python.
kvswap_result describe(const Job& job) {
  kvswap_result result{};
  result.id = job.id;
  result.nbytes = job.nbytes;
  result.submit_seconds = job.submit_seconds;
  result.queue_seconds = job.queue_seconds;
  result.copy_seconds = job.copy_seconds;
  result.channel = job.channel;
  result.layer_groups = job.layer_groups;
  result.path = job.path;
  result.state = static_cast<int32_t>(job.state);
  result.error = job.error.c_str();
  result.job = const_cast<Job*>(&job);
  return result;
}

// Hands one of our references to Python.
void* lend(const JobRef& job) {
  job->references.fetch_add(1);
  return job.get();
}

// Writes results one after another, each with a reference to its job.
class Results {
 public:
  explicit Results(kvswap_result* results) : results_(results) {}

  void operator()(const JobRef& job) {
    results_[count] = describe(*job);
    results_[count++].job = lend(job);
  }

  int count = 0;

 private:
  kvswap_result* results_;
};

// stream_device: -1 for the stream that is current on `device`.
kvswap::cuda::StreamRef resolve(int device, void* stream, int stream_device) {
  if (stream_device < 0) return kvswap::cuda::current_stream(device);
  return {stream_device, stream};
}

}  // namespace

void* kvswap_handler_create(const kvswap_group* groups, int count, int64_t layers, int device,
                            bool threaded, const kvswap_path_options* options) {
  void* handler = nullptr;
  succeeds([&] {
    std::optional<kvswap::cuda::ContextGuard> context;
    if (device >= 0) context.emplace(device);
    handler = new Handler(read_groups(groups, count, device), layers, device, threaded, *options);
  });
  return handler;
}

const char* kvswap_handler_path_problem(void* handler) {
  return handler_at(handler).path_problem().c_str();
}

void kvswap_handler_destroy(void* handler) { delete static_cast<Handler*>(handler); }

bool kvswap_handler_rebind(void* handler, const kvswap_group* groups, int count) {
  return succeeds_in(handler,
                     [&](Handler& of) { of.rebind(read_groups(groups, count, of.device())); });
}

void* kvswap_handler_submit(void* handler, kvswap_request* request) {
  void* job = nullptr;
  succeeds_in(handler, [&](Handler& of) {
    const JobRef submitted = of.submit(*request);
    request->id = submitted->id;
    job = lend(submitted);
  });
  return job;
}

int kvswap_handler_finished(void* handler, kvswap_result* results, int capacity) {
  Results found(results);
  const bool well = succeeds([&] { handler_at(handler).report(capacity, std::ref(found)); });
  return well ? found.count : -1;
}

int kvswap_handler_wait(void* handler, void* const* jobs, int count, double seconds) {
  int ended = -1;
  succeeds([&] {
    std::vector<Job*> list;
    for (int i = 0; i < count; ++i) list.push_back(static_cast<Job*>(jobs[i]));
    ended = handler_at(handler).wait(list, jobs == nullptr, seconds);
  });
  return ended;
}

int kvswap_handler_unreported_failures(void* handler, kvswap_result* results, int capacity) {
  Results found(results);
  const bool well =
      succeeds([&] { handler_at(handler).look_at_failures(capacity, std::ref(found)); });
  return well ? found.count : -1;
}

int kvswap_handler_close(void* handler, double seconds) {
  int closed = -1;
  succeeds_in(handler, [&](Handler& of) { closed = of.close(seconds); });
  return closed;
}

void kvswap_job_release(void* job) { JobRef::release(static_cast<Job*>(job)); }

bool kvswap_job_result(void* handler, void* job, kvswap_result* result) {
  return succeeds([&] { *result = handler_at(handler).look(static_cast<Job*>(job), describe); });
}

int kvswap_job_done(void* handler, void* job) {
  int done = -1;
  succeeds([&] { done = handler_at(handler).has_ended(static_cast<Job*>(job)); });
  return done;
}

bool kvswap_job_wait_on(void* handler, void* job, int layer_group, void* stream,
                        int stream_device) {
  return succeeds_in(handler, [&](Handler& of) {
    if (of.device() < 0) return;  // the job has ended
    of.wait_on(static_cast<Job*>(job), layer_group, resolve(of.device(), stream, stream_device));
  });
}

int kvswap_job_cancel(void* handler, void* job) {
  int cancelled = -1;
  succeeds_in(handler, [&](Handler& of) { cancelled = of.cancel(static_cast<Job*>(job)); });
  return cancelled;
}

void* kvswap_gate_create(void* handler, int parts) {
  void* gate = nullptr;
  succeeds_in(handler, [&](Handler& of) { gate = of.make_gate(parts); });
  return gate;
}

void kvswap_gate_release(void* gate) { kvswap::Gate::release(static_cast<kvswap::Gate*>(gate)); }

bool kvswap_gate_wait(void* gate, int part, void* stream, int stream_device) {
  const auto& of = *static_cast<kvswap::Gate*>(gate);
  return succeeds([&] { of.wait(part, resolve(of.device, stream, stream_device)); });
}

bool kvswap_handler_metrics(void* handler, int channel, kvswap_metrics* metrics) {
  return succeeds([&] { *metrics = handler_at(handler).metrics(channel); });
}
