#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace kvferry {

// Counters and gauges of one node; written by its progress thread and its lanes', readable from
// any.
struct Metrics {
  using Value = std::atomic<int64_t>;
  Value bytes_sent{0};
  Value bytes_received{0};
  Value chunks_sent{0};
  Value chunks_in_place{0};  // Of those sent: the peer read them in this side's pool.
  Value chunks_lent{0};      // Of those sent: straight from where they lie, ungathered.
  Value chunks_in_lanes{0};  // Of those sent: by lanes beside the first.
  Value chunks_received{0};
  Value chunks_dropped{0};  // Of no live transfer, or contradicting one.
  Value checksum_failures{0};
  Value fetches_started{0};  // As receiver.
  // Asked anew, behind what had come: after silence of a peer, a lease that was taken back to be
  // published again, one-sided reads that failed or had no room, chunks that were read too late on
  // this host.
  Value fetches_restarted{0};
  Value fetches_ok{0};
  Value fetches_failed{0};
  Value transfers_started{0};    // As sender.
  Value transfers_in_place{0};   // Of those started: the peer reads its pages in this side's pool.
  Value transfers_on_device{0};  // Of those started: gathered in chunks on the pool's device.
  Value transfers_direct{0};     // Of those started: as that, with one-sided reads from afar.
  Value transfers_cast{0};       // Of those started: to other dtypes or scales.
  Value transfers_ok{0};
  Value transfers_failed{0};
  Value fetches_refused{0};  // As sender.
  Value calls_started{0};    // As the one who asks.
  Value calls_failed{0};
  Value calls_served{0};
  Value strangers{0};  // Connected, and were no peers: without the key, or a token, or no kvferry.
  Value hellos_refused{0};
  Value messages_malformed{0};
  Value messages_stale{0};    // Of another epoch.
  Value messages_by_link{0};  // Sent over a data connection instead of ZeroMQ.
  Value peers{0};             // Gauge.
  Value peers_mapped{0};      // Gauge: of them, those that chunks go to through shared memory.
  Value peers_lost{0};
  Value transfers_active{0};    // Gauge, as sender.
  Value fetches_active{0};      // Gauge, as receiver.
  Value arena_chunks{0};        // Gauge: all of them.
  Value arena_chunks_taken{0};  // Gauge.

  std::vector<std::pair<std::string, int64_t>> Snapshot() const {
    return {
        {"bytes_sent", bytes_sent},
        {"bytes_received", bytes_received},
        {"chunks_sent", chunks_sent},
        {"chunks_in_place", chunks_in_place},
        {"chunks_lent", chunks_lent},
        {"chunks_in_lanes", chunks_in_lanes},
        {"chunks_received", chunks_received},
        {"chunks_dropped", chunks_dropped},
        {"checksum_failures", checksum_failures},
        {"fetches_started", fetches_started},
        {"fetches_restarted", fetches_restarted},
        {"fetches_ok", fetches_ok},
        {"fetches_failed", fetches_failed},
        {"transfers_started", transfers_started},
        {"transfers_in_place", transfers_in_place},
        {"transfers_on_device", transfers_on_device},
        {"transfers_direct", transfers_direct},
        {"transfers_cast", transfers_cast},
        {"transfers_ok", transfers_ok},
        {"transfers_failed", transfers_failed},
        {"fetches_refused", fetches_refused},
        {"calls_started", calls_started},
        {"calls_failed", calls_failed},
        {"calls_served", calls_served},
        {"strangers", strangers},
        {"hellos_refused", hellos_refused},
        {"messages_malformed", messages_malformed},
        {"messages_stale", messages_stale},
        {"messages_by_link", messages_by_link},
        {"peers", peers},
        {"peers_mapped", peers_mapped},
        {"peers_lost", peers_lost},
        {"transfers_active", transfers_active},
        {"fetches_active", fetches_active},
        {"arena_chunks", arena_chunks},
        {"arena_chunks_taken", arena_chunks_taken},
    };
  }
};

}  // namespace kvferry
