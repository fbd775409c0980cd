#include "offload/handler.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "bindings/python.h"
#include "bindings/reservation.h"
#include "check.h"
#include "copy/relay_gain.h"
#include "cuda/context.h"
#include "offload/clock.h"

// Handlers and jobs. Everything that takes the scheduler's lock releases the GIL: another
// thread may hold that lock for the time of some calls of the driver.
namespace kvswap::bindings {
namespace {

// The native part of torch_kvswap.Job. Its handler sets `job` when it submits it, so that an
// exception that Python raises right after the call loses no job.
struct PyJob {
  int channel, layer_groups;
  nb::any handler, tag;
  JobRef job;

  PyJob(int channel, int layer_groups, nb::any handler, nb::any tag)
      : channel(channel),
        layer_groups(layer_groups),
        handler(std::move(handler)),
        tag(std::move(tag)) {}
  // Throws if its submission has failed.
  Job& get() const {
    KVSWAP_CHECK(job, "the job was not submitted");
    return *job;
  }
  int64_t id() const { return job ? job->id : 0; }
  uint64_t nbytes() const { return job ? job->nbytes : 0; }
};

// A job may be in a cycle with its handler, or with its tag.
int traverse_job(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  const PyJob& job = *nb::inst_ptr<PyJob>(self);
  Py_VISIT(job.handler.ptr());
  Py_VISIT(job.tag.ptr());
  return 0;
}

int clear_job(PyObject* self) {
  if (!nb::inst_ready(self)) return 0;
  PyJob& job = *nb::inst_ptr<PyJob>(self);
  const nb::object handler = std::move(job.handler), tag = std::move(job.tag);
  return 0;  // which frees them, when the job has none any more
}

PyType_Slot job_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_job)},
                           {Py_tp_clear, reinterpret_cast<void*>(clear_job)},
                           {0, nullptr}};

const char* name_of(State state) {
  static constexpr const char* names[] = {"queued", "running", "done", "failed", "cancelled"};
  return names[static_cast<int>(state)];
}

// The Result of a job that has ended, which does not change any more.
nb::any result_of(const Job& job, const nb::object& tag) {
  nb::tuple rejected;
  nb::object error = nb::none();
  if (job.rejected != nullptr) rejected = nb::tuple(nb::cast(*job.rejected));
  if (!job.error.empty()) {
    error = python.make_error(static_cast<int>(job.error.kind()), job.error.c_str(), rejected);
  }
  nb::dict fields;
  fields["job_id"] = job.id;
  fields["direction"] = direction_name(job.channel);
  fields["state"] = name_of(job.state);
  fields["nbytes"] = job.nbytes;
  fields["link_bytes"] = job.link_bytes;
  fields["copy_method"] = copy_method_name(job.copy_method);
  fields["submit_seconds"] = job.submit_seconds.load();
  fields["queue_seconds"] = job.queue_seconds;
  fields["copy_seconds"] = job.copy_seconds;
  fields["rejected"] = rejected;
  fields["error"] = error;
  fields["tag"] = tag;
  // Result is a frozen dataclass, whose __init__ takes longer than all of the above.
  auto* type = reinterpret_cast<PyTypeObject*>(python.Result.ptr());
  nb::object result = nb::steal(PyType_GenericAlloc(type, 0));
  if (!result.is_valid() ||
      PyObject_GenericSetAttr(result.ptr(), nb::str("__dict__").ptr(), fields.ptr()) != 0) {
    throw nb::python_error();
  }
  return as_any(result);
}

nb::object histogram_of(const Histogram& histogram) {
  nb::list counts;
  for (const uint64_t count : histogram.counts) counts.append(count);
  return nb::make_tuple(nb::tuple(counts), histogram.sum);
}

// Tags of the jobs that were not reported, by number. Python has them: a tag may refer to the
// handler, and the native handler is kept until it is closed.
using Tags = nb::typed<nb::dict, int, nb::any>;

nb::object tag_of(const Job& job, const Tags& tags) {
  PyObject* tag = nullptr;  // borrowed
  if (job.tag != 0) tag = PyDict_GetItemWithError(tags.ptr(), nb::int_(job.tag).ptr());
  return tag == nullptr ? nb::none() : nb::borrow(tag);
}

// Shares its range with native groups, which must not need the GIL to let go of it.
struct PyReadyRange {
  std::shared_ptr<ReadyRange> range;
};

// Streams: the handle, and the GPU of the stream; -1 for the one that is current on the device.
StreamRef stream_of(const Device& device, uintptr_t handle, int gpu) {
  if (gpu < 0) return device.current_stream();
  return {gpu, reinterpret_cast<Stream>(handle)};
}

using Layouts = nb::typed<nb::list, GroupLayout>;

// Calls wait(seconds) without the GIL until it returns a number that is not 0, or for `timeout`
// seconds; without a timeout for ever. Python's signal handlers run in between.
template <typename Wait>
int wait_in_slices(std::optional<double> timeout, const Wait& wait) {
  constexpr double kSlice = 0.1;
  const double began = now();
  for (;;) {
    const double left = timeout ? *timeout - (now() - began) : kSlice;
    const int answer = without_gil([&] { return wait(std::clamp(left, 0.0, kSlice)); });
    if (answer != 0) return answer;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (timeout && left <= kSlice) return 0;
  }
}

// Owns a handler. One that was not closed is never freed: its threads, and copies, may still run.
class PyHandler {
 public:
  // groups: what holds the memory of the layouts, for Python.
  PyHandler(nb::any groups, Layouts layouts, bool is_list, int64_t num_layers,
            DeviceKind device_kind, int device, bool submit_thread,
            const CopyMethodOptions& options)
      : is_list_(is_list), num_groups_(static_cast<int>(layouts.size())) {
    const auto described = items_of<const GroupLayout*>(layouts);
    without_gil([&] {
      Device& on = find_device(device_kind, device);
      const ContextGuard context(on);
      handler_ = std::make_unique<Handler>(read_groups(described, on), num_layers, on,
                                           submit_thread, options);
    });
    groups_ = std::move(groups);
  }
  ~PyHandler() {
    if (!is_closed_ || !process_.is_current()) handler_.release();
  }

  void check_process() const { process_.check(); }
  bool is_current_process() const { return process_.is_current(); }

  const std::string& slower_copies() const { return handler_->slower_copies(); }

  void check_open() {
    Handler& handler = alive();
    // Without the GIL only if it waits: to get that back may take the 5 ms that another thread has.
    if (!handler.check_open(false)) without_gil([&] { handler.check_open(true); });
  }

  void submit(PyJob& job, nb::handle gpu_block_ids, nb::handle page_ids, nb::handle first_slot,
              nb::handle after, Tags tags, Reservation* reserved, nb::handle computed_in) {
    Request request;
    request.began = now();
    process_.check();
    request.channel = job.channel;
    request.layer_groups = job.layer_groups;
    request.is_grouped = is_list_;
    if (!after.is_none()) {
      for (const auto& [is_event, handle] : items_of<std::tuple<bool, uintptr_t>>(after)) {
        request.after.push_back({is_event, reinterpret_cast<void*>(handle)});
      }
    }
    request.parts.resize(static_cast<size_t>(num_groups_));
    read_lists("gpu_block_ids", gpu_block_ids,
               [&](int g) -> auto& { return request.parts[g].blocks; });
    read_lists("page_ids", page_ids, [&](int g) -> auto& { return request.parts[g].pages; });
    int overflow = 0;
    if (PyLong_CheckExact(first_slot.ptr())) {
      const int64_t first = PyLong_AsLongLongAndOverflow(first_slot.ptr(), &overflow);
      for (Request::Part& part : request.parts) part.first_slot = first;
    }
    if (!PyLong_CheckExact(first_slot.ptr()) || overflow != 0) {
      const nb::object read = python.read_first_slots(first_slot, is_list_ ? num_groups_ : 0);
      size_t g = 0;
      for (const nb::handle one : read) request.parts[g++].first_slot = nb::cast<int64_t>(one);
    }
    if (!computed_in.is_none()) request.computed_in = read_lists("gpu_block_ids", computed_in);
    if (reserved != nullptr && reserved->is_held()) request.reserved = &reserved->pages_of_job;
    if (!job.tag.is_none()) {
      request.tag = ++last_tag_;
      tags[nb::int_(request.tag)] = job.tag;
    }
    try {
      job.job = in_context([&](Handler& of) {
        if (after.is_none()) request.after.push_back({false, of.device().current_stream().handle});
        return of.submit(request);
      });
    } catch (...) {
      if (request.tag != 0) nb::del(tags[nb::int_(request.tag)]);
      throw;
    }
  }

  // The jobs that have not ended and use one of these blocks. job_type: torch_kvswap.Job. owner:
  // the handler that the jobs name.
  nb::typed<nb::list, nb::any> jobs_using(nb::handle gpu_block_ids, nb::any job_type, nb::any owner,
                                          Tags tags) {
    const BlockLists blocks = read_lists("gpu_block_ids", gpu_block_ids);
    return python_jobs(call([&](Handler& of) { return of.jobs_using(blocks); }), job_type, owner,
                       tags);
  }

  void mark_written(nb::handle page_ids) {
    const PageLists pages = read_lists("page_ids", page_ids);
    call([&](Handler& of) { of.mark_written(pages, is_list_); });
  }

  // The results of jobs that have ended since the last call. If it raises, the next call returns
  // them.
  nb::typed<nb::list, nb::any> poll(Tags tags) {
    constexpr size_t kAtOnce = 256;  // for less than a millisecond
    Handler& handler = alive();
    EndedJobs jobs = std::move(unreturned_);
    while (without_gil([&] { return handler.report(kAtOnce, jobs); })) {
    }
    nb::list results;
    try {
      for (Job& job : jobs) results.append(result_of(job, tag_of(job, tags)));
    } catch (...) {
      while (!jobs.empty()) unreturned_.push_back(jobs.pop_front());
      throw;
    }
    for (const Job& job : jobs) {
      if (job.tag != 0) nb::del(tags[nb::int_(job.tag)]);
    }
    return results;
  }

  void end_reservations() {
    call([](Handler& of) { of.end_reservations(); });
  }

  bool wait_for_ended(std::optional<double> timeout) {
    Handler& handler = alive();
    return wait_in_slices(timeout, [&](double s) { return handler.wait_for_ended(s); }) != 0;
  }

  // Returns whether all are done; after the timeout what has not ended: how many, and the direction
  // and number of the first. jobs: none for all that were not reported.
  nb::any synchronize(std::optional<nb::typed<nb::sequence, PyJob>> jobs,
                      std::optional<double> timeout) {
    Handler& handler = alive();
    std::vector<Job*> list;
    if (jobs) {
      for (const PyJob* job : items_of<const PyJob*>(*jobs)) list.push_back(&job->get());
    }
    Unended unended{};
    const int answer = wait_in_slices(
        timeout, [&](double s) { return handler.synchronize(list, !jobs, s, unended); });
    if (answer != 0) return as_any(nb::bool_(answer == 1));
    const char* direction = direction_name(unended.first_channel);
    return as_any(nb::make_tuple(unended.count, direction, unended.first_id));
  }

  // The results of jobs that failed or were cancelled and were not polled.
  nb::typed<nb::list, nb::any> unreported_failures(Tags tags) {
    nb::list results;
    for (const JobRef& job : call([&](Handler& of) { return of.unreported_failures(); })) {
      results.append(result_of(*job, tag_of(*job, tags)));
    }
    return results;
  }

  // None if it is not known to have ended. Does not ask the device.
  nb::any result(const PyJob& job) {
    const bool is_over = call([&](Handler& of) { return of.is_over(job.get()); });
    if (!is_over) return as_any(nb::none());
    return result_of(job.get(), job.tag);
  }

  const char* state(const PyJob& job) {
    const auto [state, was_cancelled] = call([&](Handler& of) { return of.state_of(job.get()); });
    return was_cancelled ? "cancelling" : name_of(state);
  }

  bool query(const PyJob& job) {
    return call([&](Handler& of) { return of.has_ended(&job.get()); });
  }

  void wait(const PyJob& job, int layer_group, uintptr_t stream, int gpu) {
    in_context([&](Handler& of) {
      of.wait(&job.get(), layer_group, stream_of(of.device(), stream, gpu));
    });
  }

  bool cancel(const PyJob& job) {
    return in_context([&](Handler& of) { return of.cancel(&job.get()); });
  }

  nb::typed<nb::dict, nb::str, nb::any> metrics(int channel) {
    const ChannelMetrics of = call([&](Handler& handler) { return handler.metrics(channel); });
    nb::dict read, methods, relayed;
    const std::pair<const char*, uint64_t> counts[] = {{"submitted", of.submitted},
                                                       {"done", of.done},
                                                       {"failed", of.failed},
                                                       {"cancelled", of.cancelled},
                                                       {"bytes", of.bytes},
                                                       {"link_bytes", of.link_bytes},
                                                       {"blocks", of.blocks},
                                                       {"encoded_blocks", of.encoded_blocks},
                                                       {"rejected_blocks", of.rejected_blocks},
                                                       {"corrupted_blocks", of.corrupted_blocks},
                                                       {"queued", of.queued},
                                                       {"running", of.running},
                                                       {"transfers", of.transfers},
                                                       {"streams", of.streams},
                                                       {"events", of.events}};
    for (const auto& [name, count] : counts) read[name] = count;
    for (int method = 0; method < kCopyMethods; ++method) {
      methods[copy_method_name(static_cast<CopyMethod>(method))] = of.jobs_by_copy_method[method];
    }
    read["jobs_by_copy_method"] = methods;
    for (const auto& [device, bytes] : of.relayed_bytes) relayed[nb::int_(device)] = bytes;
    read["relayed_bytes"] = relayed;
    read["exchanged_bytes"] = of.exchanged_bytes;
    read["submit"] = histogram_of(of.submit);
    read["queue"] = histogram_of(of.queue);
    read["copy"] = histogram_of(of.copy);
    return read;
  }

  const nb::any& groups() const { return groups_; }

  void rebind(nb::any groups, Layouts layouts) {
    const auto described = items_of<const GroupLayout*>(layouts);
    in_context([&](Handler& of) { of.rebind(read_groups(described, of.device())); });
    std::swap(groups_, groups);  // the old cache is freed after the call
  }

  // Joins the other ranks in an exchange in this shared memory, before any job. Returns why that
  // was not possible; None if all have joined. pools: see CopyPlanner. timeout: in seconds.
  std::optional<std::string> join_exchange(uintptr_t memory, int rank, int ranks, uint64_t pools,
                                           double deadline, double timeout) {
    const auto exchange =
        std::make_shared<Exchange>(reinterpret_cast<void*>(memory), rank, ranks, deadline);
    std::string why = "not all ranks have joined";
    try {
      if (wait_in_slices(timeout, [&](double seconds) {
            return in_context_of(
                *handler_, [&](Handler& of) { return of.join_exchange(exchange, pools, seconds); });
          }) != 0)
        return {};
    } catch (const std::runtime_error& error) {
      why = error.what();
    }
    exchange->end(Exchange::kFailed);
    return why;
  }

  void close() {
    process_.check();
    wait_in_slices(std::nullopt, [&](double seconds) {
      in_context_of(*handler_, [&](Handler& of) {
        if (of.close(seconds)) is_closed_ = true;  // another thread may have closed it
      });
      return is_closed_.load();
    });
  }

 private:
  static nb::list python_jobs(const std::vector<JobRef>& jobs, const nb::any& job_type,
                              const nb::any& owner, const Tags& tags) {
    nb::list made;
    for (const JobRef& job : jobs) {
      const nb::object one = job_type(job->channel, job->layer_groups, owner, tag_of(*job, tags));
      nb::cast<PyJob&>(one).job = job;
      made.append(one);
    }
    return made;
  }

  static std::vector<Group> read_groups(const std::vector<const GroupLayout*>& groups,
                                        Device& device) {
    std::vector<Group> read;
    for (const GroupLayout* group : groups) read.push_back(read_group(*group, device));
    return read;
  }

  // Reads the ids of each group g to list_of(g).
  template <typename ListOf>
  void read_lists(const char* name, nb::handle ids, const ListOf& list_of) const {
    if (!is_list_) return read_ids(name, ids, list_of(0));
    const auto split = split_ids(name, ids, num_groups_);
    for (int g = 0; g < num_groups_; ++g) {
      read_ids(ArgumentNames{true, g}.list(name), split[g], list_of(g), num_groups_);
    }
  }
  std::vector<std::vector<int64_t>> read_lists(const char* name, nb::handle ids) const {
    std::vector<std::vector<int64_t>> lists(static_cast<size_t>(num_groups_));
    read_lists(name, ids, [&](int g) -> auto& { return lists[g]; });
    return lists;
  }

  Handler& alive() const {
    process_.check();
    return *handler_;
  }

  // Runs the body without the GIL.
  template <typename Body>
  std::invoke_result_t<Body, Handler&> call(const Body& body) const {
    Handler& handler = alive();
    return without_gil([&] { return body(handler); });
  }

  // Runs the body in the context of the handler's device. A lost device may refuse its context; the
  // body runs all the same. Functions that only read jobs need no context: the scheduler takes it
  // if something runs on the device.
  template <typename Body>
  static std::invoke_result_t<Body, Handler&> in_context_of(Handler& handler, const Body& body) {
    std::optional<ContextGuard> context;
    try {
      context.emplace(handler.device());
    } catch (const std::exception& error) {
      handler.on_context_error(Reason(error));
    }
    return body(handler);
  }

  template <typename Body>
  std::invoke_result_t<Body, Handler&> in_context(const Body& body) const {
    return call([&](Handler& of) { return in_context_of(of, body); });
  }

  const ForkGuard process_{"handler"};
  const bool is_list_;
  const int num_groups_;
  std::unique_ptr<Handler> handler_;
  nb::any groups_;
  std::atomic<bool> is_closed_{false};
  int64_t last_tag_ = 0;
  EndedJobs unreturned_;  // reported by a poll() that has raised
};

// The cache may refer to what refers to its handler. Whatever breaks such a cycle, the groups stay
// as long as the handler.
int traverse_handler(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (nb::inst_ready(self)) Py_VISIT(nb::inst_ptr<PyHandler>(self)->groups().ptr());
  return 0;
}

PyType_Slot handler_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_handler)},
                               {0, nullptr}};

void bind_layouts(nb::module_& module) {
  module.def("layer_group_of", layer_group_of, "layer"_a, "layer_groups"_a, "num_layers"_a);

  nb::class_<PyReadyRange>(module, "ReadyRange")
      .def(
          "__init__",
          [](PyReadyRange* self, int64_t end_page, int64_t chunk_blocks) {
            new (self) PyReadyRange{std::make_shared<ReadyRange>(end_page, chunk_blocks)};
          },
          "end_page"_a, "chunk_blocks"_a)
      .def_prop_ro("end_page", [](const PyReadyRange& of) { return of.range->end_page(); })
      .def_prop_ro("chunk_blocks",
                   [](const PyReadyRange& of) { return of.range->chunk_blocks().load(); })
      .def(
          "publish",
          [](PyReadyRange& of, int64_t end_page, int64_t chunk_blocks) {
            of.range->publish(end_page, chunk_blocks);
          },
          "end_page"_a, "chunk_blocks"_a)
      .def(
          "check",
          [](const PyReadyRange& of, int64_t page, int64_t num_pages) {
            check_page("page", page, num_pages, *of.range);
          },
          "page"_a, "num_pages"_a);

  nb::class_<GroupLayout>(module, "GroupLayout")
      .def(
          "__init__",
          [](GroupLayout* self, nb::handle gpu_bases, nb::handle gpu_strides,
             nb::handle gpu_storages, nb::handle sizes, nb::handle host_bases,
             nb::handle host_strides, nb::handle layers, int64_t num_blocks, int64_t num_pages,
             int64_t blocks_per_page, int block_space, int slot_space, const PyEncoding& encoding,
             const PyReadyRange& ready_range) {
            GroupLayout layout;
            layout.layers = read_numbers(layers);
            layout.num_blocks = num_blocks;
            layout.num_pages = num_pages;
            layout.blocks_per_page = blocks_per_page;
            layout.block_space = block_space;
            layout.slot_space = slot_space;
            layout.encoding = encoding.encoding;
            layout.ready_range = ready_range.range;
            layout.gpu.bases = read_numbers<uint64_t>(gpu_bases);
            layout.gpu.strides = read_numbers<uint64_t>(gpu_strides);
            layout.gpu_storages = read_numbers<uint64_t>(gpu_storages);
            layout.gpu.sizes = layout.host.sizes = read_numbers<uint64_t>(sizes);
            layout.host.bases = read_numbers<uint64_t>(host_bases);
            layout.host.strides = read_numbers<uint64_t>(host_strides);
            new (self) GroupLayout(std::move(layout));
          },
          nb::kw_only(), "gpu_bases"_a, "gpu_strides"_a, "gpu_storages"_a, "sizes"_a,
          "host_bases"_a, "host_strides"_a, "layers"_a, "num_blocks"_a, "num_pages"_a,
          "blocks_per_page"_a, "block_space"_a, "slot_space"_a, "encoding"_a, "ready_range"_a)
      .def_ro("block_space", &GroupLayout::block_space)
      .def_ro("slot_space", &GroupLayout::slot_space);

  nb::class_<CopyMethodOptions>(module, "CopyMethodOptions")
      .def(
          "__init__",
          [](CopyMethodOptions* self, int copy_method, bool without_kernels, const char* setting,
             uint64_t staging_bytes) {
            new (self) CopyMethodOptions{copy_method, without_kernels, setting, staging_bytes};
          },
          "copy_method"_a, "without_kernels"_a, "setting"_a, "staging_bytes"_a)
      .def_rw("caller_seconds", &CopyMethodOptions::caller_seconds)
      .def(
          "add_relay", [](CopyMethodOptions& of, int device) { of.relays.push_back(device); },
          "device"_a)
      .def_rw("may_exchange", &CopyMethodOptions::may_exchange)
      .def_ro("copy_method", &CopyMethodOptions::copy_method)
      .def_ro("staging_bytes", &CopyMethodOptions::staging_bytes);
}

}  // namespace

void bind_handler(nb::module_& module) {
  nb::enum_<DeviceKind>(module, "DeviceKind")
      .value("HOST", DeviceKind::kHost)
      .value("CUDA", DeviceKind::kCuda);
  module.def("copy_methods", [] {
    std::vector<std::string> names;
    for (int method = 0; method < kCopyMethods; ++method) {
      names.emplace_back(copy_method_name(static_cast<CopyMethod>(method)));
    }
    return names;
  });
  module.def(
      "preferred_copy_methods",
      [](uint64_t block_bytes, size_t slabs, size_t runs, size_t fragments, size_t blocks,
         bool is_store, bool is_expedited, bool is_crowded) {
        std::vector<std::string> names;
        for (const CopyMethod method :
             preferred_methods({block_bytes, slabs, runs, fragments, blocks, is_store, is_expedited,
                                is_crowded})) {
          names.emplace_back(copy_method_name(method));
        }
        return names;
      },
      "block_bytes"_a, "slabs"_a, "runs"_a, "fragments"_a, "blocks"_a, "is_store"_a = false,
      "is_expedited"_a = false, "is_crowded"_a = false, "See copy_plan.h.");
  module.def(
      "measure_relay",
      [](int own, int peer) { return without_gil([&] { return measure_relay(own, peer); }); },
      "own"_a, "peer"_a, "See relay_gain.h.");
  module.def(
      "enable_peer_access",
      [](int device, int peer) { without_gil([&] { cuda::enable_peer_access(device, peer); }); },
      "device"_a, "peer"_a, "See context.h.");
  module.attr("EXCHANGE_BYTES") = Exchange::kBytes;
  module.attr("MAX_EXCHANGE_RANKS") = Exchange::kMaxRanks;
  module.attr("BUCKETS") = Histogram::kBuckets;
  bind_layouts(module);

  nb::class_<PyJob>(module, "Job", nb::type_slots(job_slots), nb::is_weak_referenceable())
      .def(nb::init<int, int, nb::any, nb::any>(), "channel"_a, "layer_groups"_a,
           "handler"_a.none(), "tag"_a.none())
      .def(
          "__init__",
          [](PyJob*, const nb::args&, const nb::kwargs&) {
            throw nb::type_error("a Job cannot be made; store() and load() return one");
          },
          nb::sig("def __init__(self, *args: typing.Any, **kwargs: typing.Any) -> None"))
      .def_prop_ro("id", &PyJob::id)
      .def_prop_ro("nbytes", &PyJob::nbytes)
      .def_prop_ro("direction", [](const PyJob& job) { return direction_name(job.channel); })
      .def_ro("layer_groups", &PyJob::layer_groups)
      .def_ro("handler", &PyJob::handler)
      .def_ro("tag", &PyJob::tag)
      // Two objects may stand for one job: jobs_using() makes new ones.
      .def(
          "__eq__",
          [](const PyJob& one, nb::handle other) {
            if (!nb::isinstance<PyJob>(other)) return false;
            const PyJob& job = nb::cast<const PyJob&>(other);
            return one.job ? one.job.get() == job.job.get() : &one == &job;
          },
          "other"_a.none())
      .def("__hash__", [](const PyJob& job) {
        const void* of = job.job ? static_cast<const void*>(job.job.get()) : &job;
        return std::hash<const void*>()(of);
      });

  nb::class_<PyHandler>(module, "Handler", nb::type_slots(handler_slots))
      .def(nb::init<nb::any, Layouts, bool, int64_t, DeviceKind, int, bool,
                    const CopyMethodOptions&>(),
           "groups"_a, "layouts"_a, "is_list"_a, "num_layers"_a, "device_kind"_a, "device"_a,
           "submit_thread"_a, "options"_a)
      .def_prop_ro("groups", &PyHandler::groups)
      .def_prop_ro("slower_copies", &PyHandler::slower_copies)
      .def("check_process", &PyHandler::check_process)
      .def_prop_ro("is_current_process", &PyHandler::is_current_process)
      .def("check_open", &PyHandler::check_open)
      .def("submit", &PyHandler::submit, "job"_a, "gpu_block_ids"_a.none(), "page_ids"_a.none(),
           "first_slot"_a.none(), "after"_a.none(), "tags"_a, "reserved"_a.none(),
           "computed_in"_a.none())
      .def("poll", &PyHandler::poll, "tags"_a)
      .def("wait_for_ended", &PyHandler::wait_for_ended, "timeout"_a.none())
      .def("synchronize", &PyHandler::synchronize, "jobs"_a.none(), "timeout"_a.none())
      .def("end_reservations", &PyHandler::end_reservations)
      .def("unreported_failures", &PyHandler::unreported_failures, "tags"_a)
      .def("jobs_using", &PyHandler::jobs_using, "gpu_block_ids"_a.none(), "job_type"_a, "owner"_a,
           "tags"_a)
      .def("mark_written", &PyHandler::mark_written, "page_ids"_a.none())
      .def("result", &PyHandler::result, "job"_a)
      .def("state", &PyHandler::state, "job"_a)
      .def("query", &PyHandler::query, "job"_a)
      .def("wait", &PyHandler::wait, "job"_a, "layer_group"_a, "stream"_a, "gpu"_a)
      .def("cancel", &PyHandler::cancel, "job"_a)
      .def("metrics", &PyHandler::metrics, "channel"_a)
      .def("rebind", &PyHandler::rebind, "groups"_a, "layouts"_a)
      .def("join_exchange", &PyHandler::join_exchange, "memory"_a, "rank"_a, "ranks"_a, "pools"_a,
           "deadline"_a, "timeout"_a)
      .def("close", &PyHandler::close);
}

}  // namespace kvswap::bindings
