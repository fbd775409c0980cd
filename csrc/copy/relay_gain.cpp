#include "copy/relay_gain.h"

#include <algorithm>
#include <chrono>
#include <limits>

#include "copy/relay.h"

namespace kvswap {
namespace {

constexpr uint64_t kPieceBytes = 16 << 20;
constexpr int kPieces = 4;  // for each link
constexpr int kRounds = 4;  // the first one warms up
constexpr double kForever = std::numeric_limits<double>::infinity();

class Memory {
 public:
  Memory(int device, uint64_t bytes) : device_(device) {
    const cuda::ContextGuard context(device);
    KVSWAP_DRIVER_CHECK(cuda::driver().allocate(&address_, bytes), "cuMemAlloc", " of ", bytes,
                        " bytes on CUDA device ", device);
  }
  ~Memory() {
    try {
      const cuda::ContextGuard context(device_);
      cuda::driver().free(address_);
    } catch (const std::exception&) {  // the device is lost
    }
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  cuda::Address address() const { return address_; }

 private:
  const int device_;
  cuda::Address address_ = 0;
};

// Of the current context.
class PinnedMemory {
 public:
  explicit PinnedMemory(uint64_t bytes) {
    KVSWAP_DRIVER_CHECK(cuda::driver().allocate_host(&memory_, bytes, cuda::kRegisterPortable),
                        "cuMemHostAlloc", " of ", bytes, " bytes");
  }
  ~PinnedMemory() { cuda::driver().free_host(memory_); }
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  cuda::Address address() const { return reinterpret_cast<cuda::Address>(memory_); }

 private:
  void* memory_ = nullptr;
};

// A stream and two events of the current context.
struct Streams {
  ~Streams() {
    for (const cuda::Event event : {filled, drained})
      if (event != nullptr) cuda::driver().destroy_event(event);
    if (copies != nullptr) cuda::driver().destroy_stream(copies);
  }

  cuda::Stream copies = nullptr;
  cuda::Event filled = nullptr, drained = nullptr;
};

// Seconds for kPieces over the own link, and as many through the relay, if there is one. The memory
// of the own GPU and of the host has two pieces, one for each link.
double seconds_of(int own, const Streams& streams, Relay* relay, bool to_host, cuda::Address on_gpu,
                  cuda::Address on_host) {
  const auto fragment = [&](cuda::Address packed, cuda::Address page) {
    FragmentList fragments;
    fragments.add(to_host ? Fragment{packed, page, kPieceBytes, 0, false}
                          : Fragment{page, packed, kPieceBytes, 0, true},
                  false);
    return fragments;
  };
  const auto relayed = [&](cuda::Address packed) {
    return fragment(packed, on_host + kPieceBytes);
  };
  const BatchOptions options;
  const auto began = std::chrono::steady_clock::now();
  for (int i = 0; i < kPieces; ++i) {
    copy_batch(fragment(on_gpu, on_host), {own, streams.copies}, options);
    if (relay == nullptr) continue;
    relay->room_for(kPieceBytes);
    const cuda::Address packed = on_gpu + kPieceBytes;
    if (to_host) {
      relay->store(relayed, kPieceBytes, packed, streams.filled, streams.drained, options);
    } else {
      relay->load(relayed, kPieceBytes, packed, options);
    }
  }
  KVSWAP_DRIVER_CHECK(cuda::driver().synchronize_stream(streams.copies), "cuStreamSynchronize");
  for (cuda::Result state = cuda::kNotReady; relay != nullptr && state == cuda::kNotReady;) {
    state = relay->query_hop();
    if (state == cuda::kSuccess) state = relay->query_link();
    if (state != cuda::kNotReady) KVSWAP_DRIVER_CHECK(state, "cuStreamQuery of a relay");
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

}  // namespace

double measure_relay(int own, int peer) {
  const cuda::ContextGuard context(own);
  const Memory on_gpu(own, 2 * kPieceBytes), ring(peer, 4 * kPieceBytes);
  const PinnedMemory host(2 * kPieceBytes);
  Streams streams;
  streams.copies = cuda::create_stream();
  streams.filled = cuda::create_event(cuda::kEventDisableTiming);
  streams.drained = cuda::create_event(cuda::kEventDisableTiming);
  cuda::record_event(streams.filled, {own, streams.copies});
  double gain = kForever;
  for (const bool to_host : {false, true}) {
    Relay relay(own, peer, to_host, ring.address(), 4 * kPieceBytes);
    double alone = kForever, both = kForever;
    for (int round = 0; round < kRounds; ++round) {
      const auto seconds = [&](Relay* by) {
        return seconds_of(own, streams, by, to_host, on_gpu.address(), host.address());
      };
      const double first = seconds(nullptr), second = seconds(&relay);
      if (round == 0) continue;
      alone = std::min(alone, first);
      both = std::min(both, second);
    }
    gain = std::min(gain, 2 * alone / both);
  }
  return gain;
}

}  // namespace kvswap
