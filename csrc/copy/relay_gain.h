#pragma once

namespace kvswap {

// How many times as fast large copies between the host and GPU `own` are when the link of `peer`
// does half of them as a relay; of stores or of loads, whichever gains less. Takes some 50 ms and
// 100 MiB. Peer access is enabled. Any thread.
double measure_relay(int own, int peer);

}  // namespace kvswap
