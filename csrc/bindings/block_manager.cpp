#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/python.h"
#include "bindings/reservation.h"
#include "check.h"
#include "prefix/manager.h"

// The native part of torch_kvswap.prefix.BlockManager. A call with few keys is made with the GIL
// held; if it would have to wait or take long, it is made without the GIL (prefix/manager.h).
namespace kvswap::bindings {
namespace {

// What a method with keys takes, in its signature.
#define KEYS                            \
  "torch_kvswap.prefix.hashing.Keys | " \
  "collections.abc.Sequence[torch_kvswap.prefix.hashing.Keys]"

using prefix::kKeyBytes;
using GroupTuple = std::tuple<size_t, size_t, size_t>;  // pages, ratio, window

// Whether these are keys in a row.
bool is_row(nb::handle keys) {
  return PyBytes_CheckExact(keys.ptr()) && PyBytes_Size(keys.ptr()) % kKeyBytes == 0;
}

// A list of keys of kKeyBytes each as bytes; nothing if it has another item.
nb::object join_list(PyObject* list) {
  constexpr auto kLength = static_cast<Py_ssize_t>(kKeyBytes);
  nb::object joined = nb::steal(PyBytes_FromStringAndSize(nullptr, PyList_Size(list) * kLength));
  if (!joined.is_valid()) throw nb::python_error();
  char* to = PyBytes_AsString(joined.ptr());
  for (Py_ssize_t i = 0; i < PyList_Size(list); ++i, to += kLength) {
    PyObject* key = PyList_GetItem(list, i);  // borrowed
    if (!PyBytes_CheckExact(key) || PyBytes_Size(key) != kLength) return {};
    std::memcpy(to, PyBytes_AsString(key), kKeyBytes);
  }
  return joined;
}

// Keys of a caller, kKeyBytes each, in a row. python.hash_keys() hashes other keys, and refuses
// what is none; the error names the argument `name`.
nb::object join_keys(const std::string& name, nb::handle keys) {
  if (is_row(keys)) return nb::borrow(keys);
  if (keys.type().is(python.PrefixKeys)) return keys.attr("joined");
  nb::object joined;
  if (PyList_CheckExact(keys.ptr())) joined = join_list(keys.ptr());
  return joined.is_valid() ? joined : python.hash_keys(name, keys);
}

// The keys of a call.
class ReadKeys {
 public:
  // keys: of the only group; of several groups a list with those of each.
  ReadKeys(nb::handle keys, bool is_list, size_t num_groups) {
    if (!is_list) {
      held_ = join_keys("keys", keys);
      one_ = row(held_);
      return;
    }
    const auto split = split_ids("keys", keys, static_cast<int>(num_groups));
    nb::list held;
    for (size_t g = 0; g < num_groups; ++g) {
      held.append(join_keys("keys[" + std::to_string(g) + "]", split[g]));
      several_.push_back(row(held[g]));
    }
    held_ = std::move(held);
  }

  const prefix::GroupKeys* of_groups() const { return several_.empty() ? &one_ : several_.data(); }

  // Of all groups.
  size_t size() const {
    size_t sum = one_.count;
    for (const prefix::GroupKeys& of_group : several_) sum += of_group.count;
    return sum;
  }

 private:
  static prefix::GroupKeys row(nb::handle keys) {
    char* bytes = nullptr;
    Py_ssize_t length = 0;
    if (PyBytes_AsStringAndSize(keys.ptr(), &bytes, &length) != 0) throw nb::python_error();
    return {reinterpret_cast<const uint8_t*>(bytes), static_cast<size_t>(length) / kKeyBytes};
  }

  nb::object held_;  // the bytes of the keys, or a list with those of each group
  prefix::GroupKeys one_{};
  std::vector<prefix::GroupKeys> several_;
};

// Makes a call of a manager that visits this many keys or pages.
template <typename Call>
auto locked(prefix::BlockManager& manager, size_t visits, const Call& call) {
  if (const auto lock = manager.try_lock(visits)) return call();
  return without_gil([&] {
    const auto lock = manager.lock();
    return call();
  });
}

// The pages of a manager in another process whose copies have ended.
struct PyEndedPages {
  std::shared_ptr<prefix::EndedPages> pages = std::make_shared<prefix::EndedPages>();

  // Appends what Reservation.end() takes for each, behind the number of its reservation.
  void take(nb::typed<nb::list, nb::any> to) {
    prefix::ReservedPages* first = pages->take();
    while (first != nullptr) {
      const std::unique_ptr<prefix::ReservedPages> ended(std::exchange(first, first->next));
      nb::list rejected;
      for (const auto& [group, page] : ended->rejected) {
        rejected.append(group);
        rejected.append(page);
      }
      to.append(nb::make_tuple(ended->id, static_cast<int>(ended->outcome), rejected));
    }
  }
};

// vLLM's key of a block: its hash, and the number of its group of layers.
constexpr size_t kGroupBytes = sizeof(uint32_t);

// Our key for each key of vLLM, in a row. That of group 0 is the hash itself. In another
// group the number changes eight bytes of it, by a factor that makes all of them differ: a prompt
// has the same hash in all groups. Keys of other hash functions are hashed as any other key is.
nb::bytes fold_keys(const nb::object& keys) {
  constexpr auto kVllmKeyBytes = static_cast<Py_ssize_t>(kKeyBytes + kGroupBytes);
  const nb::list all = PyList_CheckExact(keys.ptr()) ? nb::borrow<nb::list>(keys) : nb::list(keys);
  const size_t count = nb::len(all);
  nb::object folded =
      nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(count * kKeyBytes)));
  if (!folded.is_valid()) throw nb::python_error();
  char* to = PyBytes_AsString(folded.ptr());
  for (size_t i = 0; i < count; ++i, to += kKeyBytes) {
    // Hashing another key runs Python code, which may shorten the list.
    PyObject* item = PyList_GetItem(all.ptr(), static_cast<Py_ssize_t>(i));  // borrowed
    if (item == nullptr) throw nb::python_error();
    nb::object key = nb::borrow(item);
    char* bytes = nullptr;
    Py_ssize_t length = 0;
    if (PyBytes_AsStringAndSize(key.ptr(), &bytes, &length) != 0) throw nb::python_error();
    if (length != kVllmKeyBytes) {
      nb::list one;
      one.append(key);
      key = join_keys("keys", one);
      if (PyBytes_AsStringAndSize(key.ptr(), &bytes, &length) != 0) throw nb::python_error();
    }
    std::memcpy(to, bytes, kKeyBytes);
    uint32_t group = 0;
    if (length == kVllmKeyBytes) std::memcpy(&group, bytes + kKeyBytes, kGroupBytes);
    if (group != 0) {
      uint64_t mixed = 0;
      std::memcpy(&mixed, bytes, sizeof mixed);
      mixed ^= group * 0x9E3779B97F4A7C15;
      std::memcpy(to, &mixed, sizeof mixed);
    }
  }
  return nb::borrow<nb::bytes>(folded);
}

bool read_switch(const char* name, nb::handle value) {
  if (value.is(Py_False)) return false;
  return value.is(Py_True) || nb::cast<bool>(python.read_switch(name, value));
}

class PyBlockManager {
 public:
  PyBlockManager(nb::typed<nb::list, GroupTuple> groups, bool has_groups, int policy,
                 uint32_t store_threshold, int below, bool may_be_dropped)
      : has_groups_(has_groups),
        may_be_dropped_(may_be_dropped),
        num_groups_(groups.size()),
        manager_(read_groups(groups),
                 prefix::Options{static_cast<prefix::EvictionPolicyKind>(policy), store_threshold,
                                 static_cast<prefix::BelowPolicy>(below)}) {}

  void grow(nb::typed<nb::list, int> ready_pages) {
    process_.check();
    const auto pages = items_of<int64_t>(ready_pages);
    without_gil([&] {
      const auto lock = manager_.lock();
      manager_.grow(pages.data());
    });
  }

  nb::object lookup(nb::handle keys, nb::handle again, nb::handle hold) {
    const bool is_again = read_switch("again", again), holds = read_switch("hold", hold);
    const ReadKeys read = read_keys(keys);
    nb::object lease = holds ? nb::cast(new_lease()) : nb::none();
    auto* leased = holds ? nb::inst_ptr<Reservation>(lease) : nullptr;
    prefix::ReservedPages* pages = holds ? leased->pages_of_job.get() : nullptr;
    const prefix::Lookup of = locked(
        manager_, read.size(), [&] { return manager_.lookup(read.of_groups(), is_again, pages); });
    if (holds && !leased->begin()) lease = nb::none();
    // Lookup is a named tuple; its own constructor takes four times as long.
    auto* type = reinterpret_cast<PyTypeObject*>(python.Lookup.ptr());
    static const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
    nb::object made = nb::steal(allocate(type, 5));
    if (!made.is_valid()) throw nb::python_error();
    Py_ssize_t field = 0;
    for (const int64_t length : {of.found, of.ready, of.pending, int64_t{0}}) {
      PyObject* number = PyLong_FromLongLong(length);
      if (number == nullptr || PyTuple_SetItem(made.ptr(), field++, number) != 0)
        throw nb::python_error();
    }
    if (PyTuple_SetItem(made.ptr(), field, lease.release().ptr()) != 0) throw nb::python_error();
    return made;
  }

  int64_t longest_prefix(int64_t found, nb::typed<nb::list, nb::bytes> there) const {
    if (found < 0 || there.size() != num_groups_) throw nb::value_error("there is no such prefix");
    std::vector<std::string> of_groups;
    for (const auto& group : items_of<nb::bytes>(there))
      of_groups.emplace_back(group.c_str(), group.size());
    return manager_.longest_prefix(found, of_groups);
  }

  template <bool kAll>
  std::optional<Reservation> hold(nb::handle keys) {
    const ReadKeys read = read_keys(keys);
    Reservation made = reservation(prefix::Outcome::kDone);
    locked(manager_, read.size(),
           [&] { manager_.hold(read.of_groups(), kAll, made.assigned, *made.pages_of_job); });
    if (!made.begin()) return std::nullopt;
    return made;
  }

  std::optional<Reservation> prepare_store(nb::handle keys, nb::handle hold) {
    return reserve(keys, read_switch("hold", hold), {});
  }
  std::optional<Reservation> promote(nb::handle keys, uint64_t resets) {
    return reserve(keys, false, resets);
  }

  // Also the keys of the pages, and the resets before these were stored.
  std::optional<std::tuple<Reservation, nb::bytes, uint64_t>> hold_due(size_t count, size_t group) {
    process_.check();
    Reservation made = reservation(prefix::Outcome::kFailed);
    made.assigned.counts.resize(num_groups_);
    prefix::Due due = locked(manager_, std::min(count, prefix::BlockManager::kFewKeys),
                             [&] { return manager_.hold_due(count, group, *made.pages_of_job); });
    if (!made.begin()) return std::nullopt;
    made.assigned.counts[group] = static_cast<int64_t>(due.pages.size());
    made.assigned.pages = std::move(due.pages);
    return std::tuple{std::move(made), nb::bytes(due.keys.data(), due.keys.size()), due.resets};
  }

  nb::typed<nb::list, nb::any> take_corrupted() {
    process_.check();
    nb::list taken;
    for (const auto& [group, key] :
         locked(manager_, 0, [&] { return manager_.take_corrupted(); })) {
      taken.append(
          nb::make_tuple(group, nb::bytes(reinterpret_cast<const char*>(&key), kKeyBytes)));
    }
    return taken;
  }

  nb::any lend(size_t count) {
    process_.check();
    return to_numpy(locked(manager_, count, [&] { return manager_.lend(count); }));
  }

  // keys: of the blocks on the pages; without keys the pages are free.
  void take_back(nb::handle pages, nb::handle keys) {
    process_.check();
    const ReadKeys read{keys, false, 1};
    const std::vector<int64_t> lent = read_pages(pages);
    if (read.size() != 0 && read.size() != lent.size()) {
      kvswap::fail<ValueError>(count_of(read.size(), "key"), " for ", count_of(lent.size(), "page"),
                               "; name one for each page");
    }
    const uint8_t* bytes = read.size() == 0 ? nullptr : read.of_groups()->bytes;
    locked(manager_, lent.size(), [&] { manager_.take_back(lent, bytes); });
  }

  // No other thread may end it meanwhile.
  void abandon(nb::handle reservation) {
    Reservation& of = reservation_of(reservation);
    if (of.id == 0) return;
    check_held(of);
    prefix::ReservedPages& pages = *of.pages_of_job;
    locked(manager_, pages.pins.size(), [&] { manager_.abandon(pages); });
  }

  void complete(nb::handle reservation, nb::handle rejected) {
    Reservation& of = reservation_of(reservation);
    std::vector<int64_t> positions;
    read_ids("rejected", rejected, positions);
    end(of, prefix::Outcome::kDone, pages_at(of, positions));
  }
  void fail(nb::handle reservation) {
    end(reservation_of(reservation), prefix::Outcome::kFailed, {});
  }

  void touch(nb::handle keys) {
    const ReadKeys read = read_keys(keys);
    locked(manager_, read.size(), [&] { manager_.touch(read.of_groups()); });
  }

  void order(nb::handle keys, nb::handle renew) {
    const bool is_renewed = read_switch("renew", renew);
    const ReadKeys read = read_keys(keys);
    locked(manager_, read.size(), [&] { manager_.order(read.of_groups(), is_renewed); });
  }

  void reset() {
    process_.check();
    without_gil([&] { manager_.reset(); });
  }

  uint64_t resets() const {
    process_.check();
    return manager_.resets();
  }

  std::vector<uint64_t> stats(size_t group) {
    process_.check();
    return locked(manager_, 0, [&] { return manager_.stats(group); });
  }

 private:
  // For a call of the manager, which may make it. outcome: see Reservation.
  Reservation reservation(prefix::Outcome outcome) const {
    Reservation made(manager_.ended_pages(), outcome);
    made.has_groups = has_groups_;
    made.may_be_dropped = may_be_dropped_;
    return made;
  }
  Reservation new_lease() const {  // for which nothing is copied
    return Reservation(manager_.ended_pages(), prefix::Outcome::kDone);
  }
  std::optional<Reservation> reserve(nb::handle keys, bool leases,
                                     std::optional<uint64_t> promoted_after) {
    const ReadKeys read = read_keys(keys);
    Reservation made = reservation(prefix::Outcome::kFailed);
    made.fills = true;
    if (leases) made.lease = nb::cast(new_lease());
    auto* lease = leases ? nb::inst_ptr<Reservation>(made.lease) : nullptr;
    prefix::ReservedPages* leased = leases ? lease->pages_of_job.get() : nullptr;
    const bool has_room = locked(manager_, read.size(), [&] {
      return manager_.prepare_store(read.of_groups(), promoted_after, made.assigned,
                                    *made.pages_of_job, leased);
    });
    if (!has_room) return std::nullopt;
    made.begin();
    if (leases) lease->begin();
    return made;
  }

  // Throws if it has ended, or if another manager has made it.
  void check_held(const Reservation& of) const {
    if (of.is_held() && of.pages_of_job->manager.lock() == manager_.ended_pages()) return;
    kvswap::fail<ValueError>("reservation ", of.id, " has ended before, or is another manager's");
  }
  void end(Reservation& of, prefix::Outcome outcome, prefix::RejectedPages rejected) {
    if (of.id == 0) return;
    check_held(of);
    of.note(outcome, std::move(rejected));
    auto pages = std::move(of.pages_of_job);  // so that no other thread ends it
    try {
      locked(manager_, pages->pins.size(), [&] { manager_.end(*pages); });
    } catch (...) {
      of.pages_of_job = std::move(pages);
      throw;
    }
  }

  // The pages at these positions among those of a reservation.
  static prefix::RejectedPages pages_at(const Reservation& of,
                                        const std::vector<int64_t>& positions) {
    const auto num_pages = static_cast<int64_t>(of.assigned.pages.size());
    prefix::RejectedPages pages;
    uint32_t group = 0;
    int64_t least = 0, end = 0;
    for (size_t i = 0; i < positions.size(); ++i) {
      const int64_t position = positions[i];
      if (position < least || position >= num_pages) {
        kvswap::fail<ValueError>("rejected[", i, "] is ", position, "; the reservation has ",
                                 count_of(num_pages, "page"), ": pass positions below ", num_pages,
                                 ", in ascending order");
      }
      while (position >= end) end += of.assigned.counts[group++];
      pages.emplace_back(group - 1, of.assigned.pages[position]);
      least = position + 1;
    }
    return pages;
  }

  static std::vector<int64_t> read_pages(nb::handle pages) {
    std::vector<int64_t> read;
    read_ids("pages", pages, read);
    return read;
  }

  Reservation& reservation_of(nb::handle reservation) {
    process_.check();
    if (nb::isinstance<Reservation>(reservation)) return *nb::inst_ptr<Reservation>(reservation);
    constexpr const char* kText =
        "reservation is {}; pass what prepare_load() or prepare_store() returned";
    const nb::object text = nb::str(kText).format(python.kind_of(reservation));
    PyErr_SetObject(PyExc_TypeError, text.ptr());
    throw nb::python_error();
  }

  static std::vector<prefix::GroupOptions> read_groups(nb::handle groups) {
    std::vector<prefix::GroupOptions> read;
    for (const auto& [num_pages, ratio, window] : items_of<GroupTuple>(groups))
      read.push_back({num_pages, ratio, window});
    return read;
  }

  ReadKeys read_keys(nb::handle keys) const {
    process_.check();
    return {keys, has_groups_, num_groups_};
  }

  const ForkGuard process_{"block manager"};
  const bool has_groups_;  // the groups were passed as a list, even if there is only one
  const bool may_be_dropped_;
  const size_t num_groups_;
  prefix::BlockManager manager_;
};

}  // namespace

void bind_block_manager(nb::module_& module) {
  module.attr("KEY_BYTES") = kKeyBytes;
  module.def("fold_keys", &fold_keys, "keys"_a);
  module.def("join_keys", &join_keys, "name"_a, "keys"_a.none(),
             nb::sig("def join_keys(name: str, keys: torch_kvswap.prefix.hashing.Keys) -> bytes"));

  nb::class_<PyEndedPages>(module, "EndedPages")
      .def(nb::init<>())
      .def("take", &PyEndedPages::take, "to"_a);
  nb::class_<Reservation>(module, "Reservation",
                          R"(Pages that are held, for a copy until complete() or fail() is called.

With several groups, key_indices and pages are lists with one entry per group.

Attributes:
    id (int): number of the reservation; 0 if there is nothing to store.
    fills (bool): True for a store, which fills the pages; False for a load.
    key_indices (np.ndarray): int64, index of each page's key in the given keys, ascending.
    pages (np.ndarray): int64, the pages.
    evicted (list[int]): the pages whose blocks were evicted for it, in the order of eviction.
    lease (Reservation | None): of prepare_store(hold=True): holds the blocks of all keys until its
        let_go(), or until it is dropped.)")
      .def(
          "__init__",
          [](Reservation* self, int64_t id, const PyEndedPages& ended, bool is_load) {
            const auto outcome = is_load ? prefix::Outcome::kDone : prefix::Outcome::kFailed;
            new (self) Reservation(ended.pages, outcome);
            self->id = self->pages_of_job->id = id;
          },
          "id"_a, "ended"_a, "is_load"_a)
      .def_ro("id", &Reservation::id)
      .def_ro("fills", &Reservation::fills)
      .def_prop_ro("key_indices", &Reservation::python_indices)
      .def_prop_ro("pages", &Reservation::python_pages)
      .def_prop_ro("evicted", [](const Reservation& self) { return self.assigned.evicted; })
      .def_ro("lease", &Reservation::lease,
              nb::for_getter(nb::sig("def lease(self, /) -> Reservation | None")))
      .def("__repr__",
           [](nb::handle self) {
             constexpr const char* kText =
                 "Reservation(id={0.id}, fills={0.fills}, key_indices={0.key_indices!r}, "
                 "pages={0.pages!r})";
             return nb::str(kText).format(self);
           })
      .def_prop_ro("is_held", &Reservation::is_held, "Whether it still holds its pages.")
      .def(
          "let_go", &Reservation::let_go,
          "Ends it as complete() or fail() does for a copy that was not submitted. Returns whether "
          "it still held its pages.")
      // outcome: see protocol.py. rejected: group and page of each rejected page in turn.
      .def(
          "_end",
          [](Reservation& self, int outcome, nb::handle rejected) {
            std::vector<int64_t> numbers;
            read_ids("rejected", rejected, numbers);
            prefix::RejectedPages pages;
            for (size_t i = 0; i + 1 < numbers.size(); i += 2)
              pages.emplace_back(static_cast<uint32_t>(numbers[i]), numbers[i + 1]);
            if (!self.is_held()) return;
            self.note(static_cast<prefix::Outcome>(outcome), std::move(pages));
            self.let_go();
          },
          "outcome"_a, "rejected"_a);

  nb::class_<PyBlockManager>(module, "BlockManager")
      .def(nb::init<nb::typed<nb::list, GroupTuple>, bool, int, uint32_t, int, bool>(), "groups"_a,
           "has_groups"_a, "policy"_a, "store_threshold"_a, "below"_a, "may_be_dropped"_a)
      .def("lookup", &PyBlockManager::lookup, "keys"_a.none(), nb::kw_only(),
           "again"_a.none() = false, "hold"_a.none() = false,
           nb::sig("def lookup(self, keys: " KEYS ", *, again: bool = False, hold: bool = False) "
                   "-> torch_kvswap.prefix.manager.Lookup"),
           R"(Finds the longest cached prefix.

For sliding windows and states, only the blocks needed after the prefix must be cached. Does
not count as a use for eviction; touch() and prepare_load() do.

Args:
    keys: PrefixHasher.lookup_keys(), so that at least one token remains to be computed.
    again (bool): repeats an earlier lookup; not counted for store_threshold or stats().
    hold (bool): the `lease` holds the blocks that the prefix `ready` needs, without a use.)")
      .def("prepare_load", &PyBlockManager::hold<true>, "keys"_a.none(),
           nb::sig("def prepare_load(self, keys: " KEYS ") -> Reservation | None"),
           R"(Holds the pages of ready blocks for a load.

Args:
    keys: keys of the blocks to load; with windows or states only those at
        needed_blocks(prefix).

Returns:
    Reservation | None: None, with nothing held, if a block is not ready.)")
      .def("prepare_store", &PyBlockManager::prepare_store, "keys"_a.none(), nb::kw_only(),
           "hold"_a.none() = false,
           nb::sig("def prepare_store(self, keys: " KEYS
                   ", *, hold: bool = False) -> Reservation | None"),
           R"(Assigns pages to the keys that have none, evicting other blocks if needed.

Until the store has ended, its blocks are pending, and cached blocks of these keys are not
evicted.

Args:
    keys: keys of a prompt's blocks, in order.
    hold (bool): store_threshold does not count, and the `lease` of the reservation holds the
        blocks of all keys, also after the store.

Returns:
    Reservation | None: None, with nothing changed, if there is not enough room. Its `evicted`
        lists the pages whose blocks were evicted for it, in that order, of all groups one
        after another.

Raises:
    ValueError: a key occurs twice.)")
      .def(
          "complete", &PyBlockManager::complete, "reservation"_a.none(),
          "rejected"_a.none() = nb::list(),
          nb::sig("def complete(self, reservation: Reservation, rejected: "
                  "collections.abc.Sequence[int] = ()) -> None"),
          R"(Ends a reservation whose copy succeeded, or a load that was cancelled or not submitted.

Stored blocks become ready, loaded blocks can be evicted again. Rejected blocks are
forgotten: a lookup finds only the blocks before them.

Args:
    reservation (Reservation): from prepare_load() or prepare_store().
    rejected (Sequence[int]): ascending positions in reservation.pages (all groups one after
        another) of the pages with a block in `Result.rejected`.

Raises:
    TypeError: rejected is no list of integers.
    ValueError: the reservation has already ended, or the positions do not ascend or are not
        those of its pages. Nothing is changed then.)")
      .def("fail", &PyBlockManager::fail, "reservation"_a.none(),
           nb::sig("def fail(self, reservation: Reservation) -> None"),
           R"(Ends a reservation whose copy failed, or a store that was cancelled or not submitted.

Its blocks are forgotten; after a failed load because their pages may be invalid.

Args:
    reservation (Reservation): from prepare_load() or prepare_store().

Raises:
    ValueError: the reservation has already ended.)")
      .def("touch", &PyBlockManager::touch, "keys"_a.none(),
           nb::sig("def touch(self, keys: " KEYS ") -> None"),
           R"(Counts a use of the blocks, such as a hit in the GPU cache.

Ready blocks become the last to be evicted.

Args:
    keys: keys of the blocks.)")
      .def(
          "order", &PyBlockManager::order, "keys"_a.none(), nb::kw_only(), "renew"_a.none() = false,
          nb::sig("def order(self, keys: " KEYS ", *, renew: bool = False) -> None"),
          R"(Orders the eviction of a prompt that was stored in several steps, so that its end goes first.

Not needed if each store names all keys of the prompt so far. Does not count as a use, so
"arc" does not treat the blocks as frequently used.

Args:
    keys: part of a prompt, in order. Each block is evicted before the block in front of it.
        Blocks that are not cached are skipped. Reserved blocks take their position when the
        reservation ends, unless prepare_load() or touch() uses them before.
    renew (bool): evict these blocks after all others. False keeps the position of the first
        block, so that the blocks stored last are evicted first.)")
      .def("reset", &PyBlockManager::reset, nb::sig("def reset(self) -> None"),
           R"(Forgets all blocks. Those in a second tier stay there, but are not found any more.

Reserved pages become free when their reservations end. Needs the memory of a second manager
for a moment.

Raises:
    MemoryError: nothing was changed.)")
      .def_prop_ro("resets", &PyBlockManager::resets, "How often the manager was reset.")
      // What a prefix cache, its second tier and a server call: see prefix/manager.h.
      .def("_hold", &PyBlockManager::hold<false>, "keys"_a)
      .def("_promote", &PyBlockManager::promote, "keys"_a, "resets"_a)
      .def("_hold_due", &PyBlockManager::hold_due, "count"_a, "group"_a)
      .def("_grow", &PyBlockManager::grow, "num_ready_pages"_a)
      .def("_longest_prefix", &PyBlockManager::longest_prefix, "found"_a, "there"_a)
      .def("_take_corrupted", &PyBlockManager::take_corrupted)
      .def("_lend", &PyBlockManager::lend, "count"_a)
      .def("_take_back", &PyBlockManager::take_back, "pages"_a, "keys"_a = nb::bytes("", 0),
           nb::sig("def _take_back(self, pages: collections.abc.Sequence[int], keys: "
                   "torch_kvswap.prefix.hashing.Keys = b'') -> None"))
      .def("_abandon", &PyBlockManager::abandon, "reservation"_a,
           nb::sig("def _abandon(self, reservation: Reservation) -> None"))
      .def("_stats", &PyBlockManager::stats, "group"_a);
}

}  // namespace kvswap::bindings
