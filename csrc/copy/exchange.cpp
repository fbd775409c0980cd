#include "copy/exchange.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>

#include "check.h"

namespace kvswap {
namespace {

constexpr std::chrono::milliseconds kTick{1};
constexpr double kMaxSecondsToDrain = 1;
// At least as high as any number of a piece; waits compare as signed numbers.
constexpr uint64_t kPoison = uint64_t{1} << 62;
// A rank may have begun this many loads more than another one has seen the end of: twice the number
// that a channel has in flight.
constexpr size_t kMaxLoads = 256;

constexpr uint64_t kOpen = 0;  // or an Exchange::End and the rank that has ended it
constexpr int kRankShift = 8;
constexpr uint64_t kAbsent = 0, kWaiting = 1, kReady = 2;  // phases of a rank that joins

struct alignas(64) SharedWord : std::atomic<uint64_t> {
  using std::atomic<uint64_t>::operator=;
};
static_assert(sizeof(SharedWord) == 64 && SharedWord::is_always_lock_free);

}  // namespace

struct Exchange::Rank {
  SharedWord words[kWords];
  SharedWord phase;
  SharedWord begun;  // loads that it has given to its streams
  SharedWord right;  // loads that it has found to be right
  uint64_t description;
  RingHandle ring;
  std::atomic<uint64_t> loads[kMaxLoads];  // what it has begun
};

struct Exchange::Memory {
  SharedWord state;
  Rank ranks[kMaxRanks];
};

const size_t Exchange::kBytes = sizeof(Memory);

Exchange::Exchange(void* memory, int rank, int ranks, double deadline)
    : memory_(*static_cast<Memory*>(memory)), rank_(rank), ranks_(ranks), deadline_(deadline) {}

Exchange::~Exchange() { leave(); }

Exchange::Rank& Exchange::own() const { return memory_.ranks[rank_]; }

uint64_t Exchange::word(int rank, Word word) const {
  return reinterpret_cast<uint64_t>(&memory_.ranks[rank].words[word]);
}

Exchange::RingHandle Exchange::ring_of(int rank) const { return memory_.ranks[rank].ring; }

bool Exchange::is_open() const { return memory_.state == kOpen; }

bool Exchange::join(const RingHandle& ring, uint64_t description,
                    const std::function<void()>& open) {
  if (!thread_.joinable()) {
    KVSWAP_CHECK(own().phase == kAbsent, "another process has joined as rank ", rank_);
    own().ring = ring;
    own().description = description;
    thread_ = std::thread([this] {
      pthread_setname_np(pthread_self(), "kvswap-exchange");
      watch();
    });
    own().phase = kWaiting;
  }
  KVSWAP_CHECK(is_open(), describe_end());
  if (own().phase == kWaiting) {
    if (!all_have_reached(kWaiting)) return false;
    for (int other = 0; other < ranks_; ++other) {
      if (memory_.ranks[other].description == description) continue;
      end(kDifferent);
      fail(describe_end());
    }
    open();
    own().phase = kReady;
  }
  return all_have_reached(kReady);
}

bool Exchange::all_have_reached(uint64_t phase) const {
  return std::all_of(memory_.ranks, memory_.ranks + ranks_,
                     [&](const Rank& rank) { return rank.phase >= phase; });
}

uint64_t Exchange::begin(uint64_t contents) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t load = own().begun;
  own().loads[load % kMaxLoads] = mix_hash(contents, load);
  own().begun = load + 1;
  if (!is_open()) {  // looked at behind `begun`, as leave() looks at `begun` behind the state
    own().begun = load;
    fail(describe_end());
  }
  wake_.notify_all();
  return load;
}

void Exchange::settle() { own().words[kDone] = own().begun.load(); }

std::string Exchange::failure_of(uint64_t load) {
  const std::lock_guard<std::mutex> lock(mutex_);
  note_ends();
  return load < own().right ? "" : describe_end();
}

void Exchange::end(End why) noexcept {
  uint64_t open = kOpen;
  memory_.state.compare_exchange_strong(open, why | static_cast<uint64_t>(rank_) << kRankShift);
  wake_.notify_all();
}

std::string Exchange::describe_end() const {
  const uint64_t state = memory_.state;
  const std::string rank = "rank " + std::to_string(state >> kRankShift);
  std::string what = "the exchange with the other ranks has ended: " + rank;
  switch (state & ((1 << kRankShift) - 1)) {
    case kLeft:
      what += " has closed its handler";
      break;
    case kLate:
      what += " has waited too long for the others";
      break;
    case kDifferent:
      what += " has found that another one has other pages, options or loads";
      break;
    default:
      what += " could not take part in a load";
  }
  return what +
         "; all ranks must submit the same loads in the same order; later loads go by the "
         "own link (docs/several_gpus.md)";
}

// The watching thread.

void Exchange::watch() {
  const auto deadline =
      static_cast<int64_t>(deadline_ / std::chrono::duration<double>(kTick).count());
  uint64_t last = 0;
  int64_t ticks = 0;  // not time: while this process was stopped, it has waited for nobody
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    const uint64_t begun = own().begun, done = own().words[kDone];
    if (begun == (is_open() ? own().right.load() : done)) {
      wake_.wait(lock);
      ticks = 0;
      continue;
    }
    wake_.wait_for(lock, kTick);
    note_ends();
    if (!is_open()) {
      poison();
      continue;
    }
    uint64_t progress = own().words[kStarted] + done;
    for (int rank = 0; rank < ranks_; ++rank)
      progress += memory_.ranks[rank].words[kFilled] + memory_.ranks[rank].words[kConsumed];
    const bool waits = own().words[kStarted] > done && progress == last;
    ticks = waits ? ticks + 1 : 0;
    last = progress;
    if (ticks > deadline) end(kLate);
  }
}

// Whatever has ended while the exchange was open was not poisoned.
void Exchange::note_ends() {
  const uint64_t done = own().words[kDone];
  if (!is_open()) return;
  for (uint64_t load = own().right; load < done; ++load) {
    const auto contents = [&](const Rank& rank) { return rank.loads[load % kMaxLoads].load(); };
    for (int other = 0; other < ranks_; ++other) {
      if (contents(memory_.ranks[other]) != contents(own())) return end(kDifferent);
    }
    own().right = load + 1;
  }
}

// Again and again: streams of another rank may still write a smaller number.
void Exchange::poison() {
  for (int other = 0; other < ranks_; ++other) {
    if (other == rank_) continue;
    memory_.ranks[other].words[kFilled] = kPoison;
    memory_.ranks[other].words[kConsumed] = kPoison;
  }
}

bool Exchange::rings_are_idle() const {
  return std::all_of(memory_.ranks, memory_.ranks + ranks_,
                     [](const Rank& rank) { return rank.begun == rank.words[kDone]; });
}

bool Exchange::leave() noexcept {
  if (!thread_.joinable()) return true;
  const auto wait = [&](double seconds, const auto& is_over) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (!is_over() && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(kTick);
  };
  // What this rank has loaded, the others have almost loaded, too.
  wait(deadline_, [&] {
    return !is_open() || std::all_of(memory_.ranks, memory_.ranks + ranks_, [&](const Rank& rank) {
      return rank.phase != kReady || rank.right >= own().right;
    });
  });
  end(kLeft);
  wait(kMaxSecondsToDrain, [&] { return rings_are_idle(); });
  const bool is_idle = rings_are_idle();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
  return is_idle;
}

}  // namespace kvswap
