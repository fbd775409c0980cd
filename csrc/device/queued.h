#pragma once

#include <condition_variable>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/device.h"

namespace kvswap {

enum class CommandKind {
  kBlocks,      // copies blocks of a group, or none. `event`: the start of the transfer
  kRecord,      // records `event` on `stream`
  kWait,        // `stream` waits for `event`
  kCallerWait,  // the same for the `stream` that Handler::wait() was given
  kDestroyEvent,
  kDestroyStream,
};

struct Command {
  CommandKind kind{};
  bool to_host = false;                  // of copies
  bool timed = false;                    // the time of the record is asked for
  uint64_t stream = 0, event = 0;        // numbers, never used again
  uint64_t record = 0;                   // which record of the event this is, from 1 on
  int64_t group = 0;                     // GroupLayout::number
  size_t first_slab = 0, last_slab = 0;  // last_slab is not copied
  std::vector<int64_t> blocks = {}, slots = {};
};

// A device that only torch can drive, from Python: any accelerator with torch.Stream and
// torch.Event. This class appends commands to a queue; torch_kvswap/devices/queue.py takes them
// from the queue, carries them out with torch, and reports which events have happened. So the
// scheduler never calls Python: a thread that holds the GIL, or an exiting interpreter, delays
// transfers but cannot deadlock with this library.
//
// The queue is first in, first out, and one Python thread at a time takes from it. The order of the
// commands of a stream is therefore the order in which they were appended.
//
// A copy that fails in Python fails its transfer: the text comes with the report of the transfer's
// end, and seconds_between() throws it.
//
// The mutex guards everything, for microseconds; no other lock is taken under it. Any thread may
// call.
class QueuedDevice final : public Device {
 public:
  QueuedDevice(int index, std::string name);
  ~QueuedDevice() override;

  // For Python.

  // Waits until there are commands: 1, or 0 after `seconds` or wake(), or -1 once stop() was
  // called.
  int wait(double seconds);
  // The next wait(), or the one that waits now, returns at once.
  void wake();
  // The first command, which stays the first one, and valid, until done(). So a thread that is
  // interrupted loses no command. Null: there is none.
  const Command* first() noexcept;
  void done() noexcept;
  bool is_empty();
  // This record of the event has happened, or cannot happen any more. seconds: on the clock of the
  // stream. error: why its transfer has failed; null: it has not.
  void on_happened(uint64_t event, uint64_t record, double seconds, const char* error) noexcept;
  // The device runs nothing any more. Drops all commands.
  void lose(const char* error) noexcept;
  // The thread that takes commands is to end.
  void stop();
  // An event that stands for a point of a stream of the caller, which Python keeps by its number.
  // To be destroyed with destroy_event().
  Event make_recorded_event(uint64_t& number);

  // For csrc/offload.

  std::string name() const override { return name_; }
  bool is_synchronous() const override { return false; }

  Stream create_stream() override;
  void destroy_stream(Stream stream) noexcept override;
  // Not known here; so a transfer gets one event more than it may need.
  bool is_idle(Stream) override { return false; }
  bool is_alive(Stream) noexcept override;

  // Of a stream of the caller the handle is a number that Python knows. Python passes events in
  // place of streams that a job starts after, so the current stream is never asked for.
  void wait_event(const StreamRef& stream, Event event) override;

  Event create_event(bool timed) override;
  void destroy_event(Event event) noexcept override;
  void record_event(Event event, Stream stream, const char* purpose) override;
  void wait_event(Stream stream, Event event, const char* purpose) override;
  bool has_happened(Event event) override;
  double seconds_between(Event start, Event end) override;

  const std::vector<CopyMethod>& copy_methods() const override {
    static const std::vector<CopyMethod> methods{CopyMethod::kGeneric};
    return methods;
  }
  std::unique_ptr<Copier> make_copier(Stream copies, bool to_host) override;

 private:
  friend class QueuedCopier;

  // Lists of one command, because appending such a list cannot fail.
  using Commands = std::list<Command>;
  struct QueuedStream;
  struct QueuedEvent;

  static Commands make_command(CommandKind kind);
  void append(Commands command) noexcept;
  void append(Commands command, const std::unique_lock<std::mutex>&) noexcept;
  // Waits until this record of the event has happened. False when the device is lost.
  bool wait_until_happened(const QueuedEvent& event);

  const std::string name_;
  std::mutex mutex_;
  std::condition_variable work_;      // there is a command, or stop() or wake() was called
  std::condition_variable happened_;  // an event has happened, or the device is lost
  Commands commands_;
  Commands first_;                           // the one that is being carried out
  std::map<uint64_t, QueuedEvent*> events_;  // by number
  uint64_t last_number_ = 0;                 // of a stream or an event
  bool stopping_ = false, woken_ = false, lost_ = false;
  std::string lost_reason_;
};

// Makes the device with this index. Each index is used once. Throws ValueError otherwise.
QueuedDevice& make_queued_device(int index, const std::string& name);

}  // namespace kvswap
