#include "copy/exchange.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>

#include "check.h"
#include "copy/batch.h"
#include "cuda/context.h"

namespace kvswap {
namespace {

constexpr uint64_t kPlaces = 4;  // of a ring
constexpr std::chrono::milliseconds kTick{1}, kIdleTick{50};
constexpr double kMaxSecondsToRelease = 1;
// At least as high as any number of a piece; waits compare as signed numbers.
constexpr uint64_t kPoison = uint64_t{1} << 62;
// More than a rank begins before another one has seen the end of the first: the driver's queue
// takes some hundred.
constexpr size_t kMaxLoads = 256;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct alignas(64) SharedWord : std::atomic<uint64_t> {
  using std::atomic<uint64_t>::operator=;
};
static_assert(sizeof(SharedWord) == 64 && SharedWord::is_always_lock_free);

}  // namespace

// What streams write.
enum Exchange::Word : int {
  kFilled,    // the number after that of the latest piece that is in its ring
  kConsumed,  // the number after that of the latest piece that it has unpacked
  kStarted,   // how many loads it has begun on the device
  kDone,      // how many have ended there
  kWords
};

struct Exchange::Rank {
  SharedWord words[kWords];
  SharedWord checked;             // loads that it has found to be right
  SharedWord joined, open, left;  // the latest generation of which it has done that
  uint64_t description;
  cuda::MemoryHandle ring;
  std::atomic<uint64_t> loads[kMaxLoads];  // hashes of what it has begun
};

struct Exchange::Memory {
  // The latest generation that has ended, why, and the rank that has ended it.
  struct Ended {
    uint32_t generation;
    uint16_t why, rank;
  };
  alignas(64) std::atomic<Ended> ended;
  Rank ranks[kMaxRanks];
};

const size_t Exchange::kBytes = sizeof(Memory);

Exchange::Exchange(void* memory, int rank, int ranks, double deadline)
    : memory_(*static_cast<Memory*>(memory)),
      rank_(rank),
      ranks_(ranks),
      deadline_(deadline),
      rings_(ranks) {}

Exchange::Rank& Exchange::own() const { return memory_.ranks[rank_]; }

bool Exchange::all(const std::function<bool(const Rank&)>& holds) const {
  return std::all_of(memory_.ranks, memory_.ranks + ranks_, holds);
}

bool Exchange::has_ended() const { return memory_.ended.load().generation >= generation_; }

std::string Exchange::describe_end() const {
  static constexpr const char* kWhy[] = {
      "", "has closed its handler", "has waited too long for the others",
      "has found that another one has other pages, options or loads", "could not take part"};
  const Memory::Ended ended = memory_.ended;
  return "the exchange with the other ranks has ended: rank " + std::to_string(ended.rank) + " " +
         kWhy[ended.why] +
         "; all ranks must submit the same loads in the same order; later loads go by the own link "
         "(docs/several_gpus.md)";
}

void Exchange::end(End why) noexcept {
  if (generation_ == 0) {  // it does not join: the others need not wait
    if (own().joined != own().left) return;
    generation_ = own().left + 1;
    own().joined = own().left = generation_;
  }
  Memory::Ended before = memory_.ended;
  const Memory::Ended ended{static_cast<uint32_t>(generation_), static_cast<uint16_t>(why),
                            static_cast<uint16_t>(rank_)};
  while (before.generation < generation_ && !memory_.ended.compare_exchange_weak(before, ended)) {
  }
  wake_.notify_all();
}

// Joining and leaving.

void Exchange::use_ring(int device, void* copies, void* kernels, uint64_t place_bytes) {
  const cuda::Driver& driver = cuda::driver();
  int supported = 0;
  if (driver.wait_value != nullptr && driver.write_value != nullptr) {
    KVSWAP_DRIVER_CHECK(
        driver.get_device_attribute(&supported, cuda::kHas64BitMemoryOperations, device),
        "cuDeviceGetAttribute");
  }
  KVSWAP_CHECK(supported != 0, "streams of CUDA device ", device, " cannot wait for words");
  device_ = device;
  copies_ = copies;
  kernels_ = kernels;
  place_bytes_ = place_bytes;
  cuda::Address ring = 0;
  KVSWAP_DRIVER_CHECK(driver.allocate(&ring, kPlaces * place_bytes), "cuMemAlloc", " of ",
                      kPlaces * place_bytes, " bytes on CUDA device ", device,
                      " for the exchange with other ranks");
  ring_ = rings_[rank_] = ring;
}

bool Exchange::join(uint64_t description, double seconds) {
  const double began = now();
  while (!take_step(description)) {
    if (now() - began >= seconds) return false;
    std::this_thread::sleep_for(kTick);
  }
  return true;
}

bool Exchange::take_step(uint64_t description) {
  Rank& own = this->own();
  if (generation_ == 0) {
    KVSWAP_CHECK(own.joined == own.left, "rank ", rank_,
                 " of this pool has joined already, or was killed; make a new pool");
    const uint64_t before = own.joined;
    if (!all([&](const Rank& rank) { return rank.left >= before; })) return false;
    KVSWAP_DRIVER_CHECK(cuda::driver().share_memory(&own.ring, ring_), "cuIpcGetMemHandle");
    for (SharedWord& word : own.words) word = 0;
    own.checked = 0;
    own.description = description;
    generation_ = before + 1;
    is_over_ = false;
    thread_ = std::thread([this] {
      pthread_setname_np(pthread_self(), "kvswap-exchange");
      watch();
    });
    own.joined = generation_;
  }
  KVSWAP_CHECK(!has_ended(), describe_end());
  if (own.open != generation_) {
    if (!all([&](const Rank& rank) { return rank.joined >= generation_; })) return false;
    if (!all([&](const Rank& rank) { return rank.description == description; })) {
      end(kDifferent);
      fail(describe_end());
    }
    open_rings();
    own.open = generation_;
  }
  has_joined_ = all([&](const Rank& rank) { return rank.open >= generation_; });
  return has_joined_;
}

void Exchange::open_rings() {
  for (int rank = 0; rank < ranks_; ++rank) {
    if (rank == rank_) continue;
    cuda::Address ring = 0;
    KVSWAP_DRIVER_CHECK(
        cuda::driver().open_memory(&ring, memory_.ranks[rank].ring, cuda::kOpenWithAccess),
        "cuIpcOpenMemHandle", " of rank ", rank, ", whose GPU this one must see and access");
    rings_[rank] = ring;
  }
}

// What this rank has loaded, the others have almost loaded, too.
bool Exchange::leave() noexcept {
  if (waiting_since_ < 0) waiting_since_ = now();
  const double waited = now() - waiting_since_;
  const uint64_t checked = own().checked;
  const auto has_as_much = [checked](const Rank& rank) { return rank.checked >= checked; };
  if (is_open() && waited < deadline_ && !all(has_as_much)) return false;
  if (!has_ended()) {
    end(kLeft);
    waiting_since_ = now();
    return is_over_;
  }
  return is_over_ || waited > kMaxSecondsToRelease;
}

void Exchange::close() noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable())
    thread_.join();
  else if (ring_ != 0)  // nobody knows it
    cuda::driver().free(ring_);
  ring_ = 0;
}

// Loads.

uint64_t Exchange::begin(uint64_t contents, void* start) {
  uint64_t load;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    KVSWAP_CHECK(is_open(), describe_end());
    load = begun_++;
    own().loads[load % kMaxLoads] = mix_hash(contents, load);
  }
  wake_.notify_all();
  write(copies_, kStarted, load + 1);
  cuda::wait_event({device_, kernels_}, start);
  is_loading_ = true;
  return load;
}

uint64_t Exchange::load(const PagedCopy& copy, const PackTable& table, uint64_t begin,
                        uint64_t bytes, const BatchOptions& options) {
  const Packing& packing = table.packing;
  const uint64_t block_bytes = packing.packed_bytes(copy.slabs);
  const uint64_t all = copy.count * block_bytes, first_byte = begin;
  const uint64_t unit = piece_unit(block_bytes, place_bytes_, packing.is_divisible());
  const uint64_t most = std::min(place_bytes_, all / ranks_ / kMinExchangedPieces);
  const uint64_t in_piece = std::max(unit, most / unit * unit), in_rings = kPlaces * ranks_;
  for (; begin < all && begin - first_byte < bytes; ++next_) {
    const uint64_t end = std::min(begin + in_piece, all);
    const int owner = static_cast<int>(next_ % ranks_);
    const cuda::Address place = rings_[owner] + next_ / ranks_ % kPlaces * place_bytes_;
    if (owner == rank_) {
      // The piece that was in its place has left.
      for (int rank = 0; rank < ranks_ && next_ >= in_rings; ++rank)
        wait(copies_, rank, kConsumed, next_ - in_rings + 1);
      copy_batch(packing.page_fragments(copy, begin, end, place), {device_, copies_}, options);
      write(copies_, kFilled, next_ + 1);
    } else {
      bytes_ += end - begin;
    }
    wait(kernels_, owner, kFilled, next_ + 1);
    table.pack(copy, begin, end, place, kernels_);
    write(kernels_, kConsumed, next_ + 1);
    begin = end;
  }
  return begin;
}

// Poisoned words do not wait for the own copies.
void Exchange::finish() {
  cuda::order_after({device_, copies_}, {device_, kernels_});
  write(kernels_, kDone, begun_);
  is_loading_ = false;
}

void Exchange::abandon() noexcept {
  own().words[kDone] = begun_;
  is_loading_ = false;
}

void Exchange::write(void* stream, Word word, uint64_t value) const {
  const auto address = reinterpret_cast<uint64_t>(&own().words[word]);
  KVSWAP_DRIVER_CHECK(cuda::driver().write_value(stream, address, value, 0),
                      "cuStreamWriteValue64");
}

void Exchange::wait(void* stream, int rank, Word word, uint64_t value) const {
  const auto address = reinterpret_cast<uint64_t>(&memory_.ranks[rank].words[word]);
  KVSWAP_DRIVER_CHECK(cuda::driver().wait_value(stream, address, value, cuda::kWaitUntilAtLeast),
                      "cuStreamWaitValue64");
}

std::string Exchange::failure_of(uint64_t load) {
  const std::lock_guard<std::mutex> lock(mutex_);
  note_ends();
  return load < own().checked ? "" : describe_end();
}

// Whatever has ended while the exchange was open was not poisoned.
void Exchange::note_ends() {
  const uint64_t done = own().words[kDone];
  if (has_ended()) return;
  for (uint64_t load = own().checked; load < done; ++load) {
    const uint64_t contents = own().loads[load % kMaxLoads];
    if (!all([&](const Rank& rank) { return rank.loads[load % kMaxLoads] == contents; }))
      return end(kDifferent);
    own().checked = load + 1;
  }
}

// The watching thread.

void Exchange::watch() {
  const auto deadline =
      static_cast<int64_t>(deadline_ / std::chrono::duration<double>(kTick).count());
  uint64_t last = 0;
  int64_t ticks = 0;  // not time: while this process was stopped, it has waited for nobody
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    const uint64_t started = own().words[kStarted], done = own().words[kDone];
    note_ends();
    const bool poisons = has_ended();
    if (poisons && begun_ == done) return release_rings(lock);
    uint64_t progress = started + done;
    for (int rank = 0; rank < ranks_; ++rank) {
      for (const Word word : {kFilled, kConsumed}) {
        SharedWord& shared = memory_.ranks[rank].words[word];
        if (poisons)
          shared = kPoison;  // again and again: a stream may still write a smaller number
        progress += shared;
      }
    }
    ticks = started > done && progress == last ? ticks + 1 : 0;
    last = progress;
    if (ticks > deadline) end(kLate);
    wake_.wait_for(lock, begun_ == done ? kIdleTick : kTick);
  }
}

// Nothing of this rank reads a ring any more. Memory that another process has open must not be
// freed: if a rank does not let go of it, it stays allocated until this process ends.
void Exchange::release_rings(std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  try {
    const cuda::ContextGuard context(device_);
    for (const cuda::Address ring : rings_)
      if (ring != 0 && ring != ring_) cuda::driver().close_memory(ring);
    own().left = generation_;
    const auto has_left = [this](const Rank& rank) {
      return rank.left >= generation_ || rank.joined < generation_;
    };
    lock.lock();
    while (!stopping_ && !all(has_left)) wake_.wait_for(lock, kIdleTick);
    lock.unlock();
    if (all(has_left)) cuda::driver().free(ring_);
  } catch (const std::exception&) {  // the GPU is lost
  }
  is_over_ = true;
}

}  // namespace kvswap
