#include <nanobind/stl/pair.h>

#include <string>

#include "bindings/python.h"
#include "device/queued.h"

// The commands of devices that Python drives with torch, see device/queued.h. Only wait() releases
// the GIL: the others take microseconds, and a thread that computes in Python gives the GIL back
// only after milliseconds.
namespace kvswap::bindings {

void bind_queue(nb::module_& module) {
  nb::enum_<CommandKind>(module, "CommandKind")
      .value("BLOCKS", CommandKind::kBlocks)
      .value("RECORD", CommandKind::kRecord)
      .value("WAIT", CommandKind::kWait)
      .value("CALLER_WAIT", CommandKind::kCallerWait)
      .value("DESTROY_EVENT", CommandKind::kDestroyEvent)
      .value("DESTROY_STREAM", CommandKind::kDestroyStream);

  nb::class_<Command>(module, "Command")
      .def_ro("kind", &Command::kind)
      .def_ro("to_host", &Command::to_host)
      .def_ro("timed", &Command::timed)
      .def_ro("stream", &Command::stream)
      .def_ro("event", &Command::event)
      .def_ro("record", &Command::record)
      .def_ro("group", &Command::group)
      .def_ro("first_slab", &Command::first_slab)
      .def_ro("last_slab", &Command::last_slab)
      .def_prop_ro("count", [](const Command& command) { return command.blocks.size(); })
      .def_prop_ro("blocks", [](const Command& command) { return to_numpy(command.blocks); })
      .def_prop_ro("slots", [](const Command& command) { return to_numpy(command.slots); });

  nb::class_<QueuedDevice>(module, "CommandQueue")
      .def("wait", &QueuedDevice::wait, "seconds"_a, nb::call_guard<WithoutGil>(),
           "Waits until there are commands: 1, or 0 after `seconds` or wake(), or -1 once stop() "
           "was called. One thread.")
      .def("wake", &QueuedDevice::wake,
           "The next wait(), or the one that waits now, returns at once.")
      .def_prop_ro("is_empty", &QueuedDevice::is_empty, "Whether all commands were carried out.")
      .def("first", &QueuedDevice::first, nb::rv_policy::reference,
           "The first command, which stays the first one, and valid, until done(); None if there "
           "is none. One thread at a time.")
      .def("done", &QueuedDevice::done)
      .def(
          "happened",
          [](QueuedDevice& queue, uint64_t event, uint64_t record, double seconds,
             nb::handle error) {
            const char* text = error.is_none() ? nullptr : nb::cast<const char*>(error);
            queue.on_happened(event, record, seconds, text);
          },
          "event"_a, "record"_a, "seconds"_a, "error"_a.none(),
          "This record of an event has happened, `seconds` after some point in time that is the "
          "same for all events of the stream. error: why the transfer that it ends has failed.")
      .def("lose", &QueuedDevice::lose, "error"_a,
           "The device runs nothing any more: all jobs end as failed.")
      .def("stop", &QueuedDevice::stop)
      .def(
          "make_event",
          [](QueuedDevice& queue) {
            uint64_t number = 0;
            const Event event = queue.make_recorded_event(number);
            return std::pair(reinterpret_cast<uintptr_t>(event), number);
          },
          "An event that a job can start after: its handle, and its number. Its first record "
          "counts "
          "as made, and has not happened.")
      .def(
          "destroy_event",
          [](QueuedDevice& queue, uintptr_t event) {
            queue.destroy_event(reinterpret_cast<Event>(event));
          },
          "event"_a, "After the commands that were given so far.");

  module.def(
      "make_queue", &make_queued_device, "index"_a, "name"_a, nb::rv_policy::reference,
      "The queue of a device that does not exist yet; it lives as long as the process. name: "
      "for errors.");
}

}  // namespace kvswap::bindings
