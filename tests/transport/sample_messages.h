#pragma once

// One message of each type with every field set, shared by the codec's tests. The files of
// corpus/v1 are these, as first encoded.

#include <string>
#include <utility>
#include <vector>

#include "tests/support/status.h"
#include "transport/messages.h"

namespace kvferry {

inline std::vector<std::pair<std::string, Message>> SampleMessages() {
  KvLayout layout{61, 64, DType::kFloat8E4M3, "engine-private", {{"k", 8, 128}, {"v", 8, 128}}};
  FetchMsg fetch;
  fetch.transfer_id = 0xfedcba9876543210;
  fetch.lease_id = 0x0123456789abcdef;
  fetch.positions = Must(PageRuns::FromRuns(std::vector<PageRun>{{0, 7}, {900, 1}, {70000, 300}}));
  fetch.timeout_ms = 30000;
  fetch.window_bytes = 4 << 20;
  fetch.chunk_bytes = 256 << 10;
  fetch.checksum = true;
  FetchMsg again = fetch;
  again.replaces = 0x0f1e2d3c4b5a6978;
  FetchMsg once_more = again;
  once_more.attempt = 3;
  FetchMsg from = again;
  from.from_bytes = 3 << 20;
  FetchMsg early = fetch;
  early.wait_ms = 30000;
  FetchMsg in_place = fetch;
  in_place.in_place_bytes = 32 << 20;
  FetchMsg with_reads = fetch;
  with_reads.reads = {900, 45000};
  FetchMsg with_tail = fetch;
  with_tail.tail_bytes = 123456789;
  FetchMsg with_heads = fetch;
  with_heads.heads = {6, 2};
  with_heads.reader = {3, 4};
  FetchMsg with_form = fetch;
  with_form.form = {1 << 20, ValueOrder::kHnd};
  FetchMsg with_page = fetch;
  with_page.form = {16, ValueOrder::kOther};
  FetchMsg with_values = fetch;
  with_values.values = {{DType::kFloat8E4M3, DType::kUint8}, {0.125F, 3, 1, 1e-30F}};
  FetchMsg with_dtypes = fetch;
  with_dtypes.values = {{DType::kBFloat16}, {}};
  const std::string worker("\x00\x01worker\xff", 9);
  const std::string local("\x00 0123456789abcdefghijklmnopqrst\xff", 33);
  const TcpAddress tcp{8, "::1", 65535, "\x01 0123456789abc\xff", "answer 123456789"};
  Fields fields;
  fields.Set("tokens", std::string("\x01\x00\x00\x00", 4)).Set("partition", 7);
  const std::vector<std::pair<std::string, MessageBody>> bodies = {
      {"hello", HelloMsg{"decode-0", "org/model", layout, {worker}}},
      {"welcome", WelcomeMsg{"prefill-0", {worker}}},
      {"hello_local", HelloMsg{"decode-0", "org/model", layout, {worker, local}}},
      {"welcome_local", WelcomeMsg{"prefill-0", {worker, local}}},
      {"hello_lanes", HelloMsg{"decode-0", "org/model", layout, {worker, "", {worker, "lane 2"}}}},
      {"welcome_lanes", WelcomeMsg{"prefill-0", {worker, local, {"lane 1"}}}},
      {"hello_tcp", HelloMsg{"decode-0", "org/model", layout, {"", local, {}, "", {2}}}},
      {"welcome_tcp", WelcomeMsg{"prefill-0", {"", "", {}, "", tcp}}},
      {"hello_session",
       HelloMsg{"decode-0", "org/model", layout, {"", local, {}, "", {2}, 0xfedcba9876543210}}},
      {"welcome_silence", WelcomeMsg{"prefill-0", {"", "", {}, "", tcp, 1}, 10000}},
      {"welcome_session", WelcomeMsg{"prefill-0", {"", "", {}, "", tcp, 1}}},
      {"refuse", RefuseMsg{0, absl::FailedPreconditionError("model: 'a' here, 'b' there")}},
      {"refuse_fetch", RefuseMsg{77, absl::NotFoundError("lease 4d is unknown here")}},
      {"fetch", fetch},
      {"fetch_again", again},
      {"fetch_attempt", once_more},
      {"fetch_from", from},
      {"fetch_early", early},
      {"fetch_in_place", in_place},
      {"fetch_tail", with_tail},
      {"fetch_reads", with_reads},
      {"welcome_direct", WelcomeMsg{"prefill-0", {worker, "", {}, "direct \x01"}}},
      {"hello_heads", HelloMsg{"decode-3", "org/model", layout, {worker}, {8, 32}}},
      {"fetch_heads", with_heads},
      {"hello_converts", HelloMsg{"decode-3", "org/model", layout, {worker}, {}, true}},
      {"hello_casts", HelloMsg{"decode-3", "org/model", layout, {worker}, {}, true, true}},
      {"fetch_form", with_form},
      {"fetch_values", with_values},
      {"fetch_dtypes", with_dtypes},
      {"fetch_page", with_page},
      {"done_reader", DoneMsg{fetch.transfer_id, fetch.lease_id, 0, {63, 64}}},
      {"done", DoneMsg{fetch.transfer_id, fetch.lease_id, int64_t{1} << 40}},
      {"cancel", CancelMsg{fetch.transfer_id, "cancelled"}},
      {"abort", AbortMsg{fetch.transfer_id, absl::AbortedError("taken back")}},
      {"abort_again", AbortMsg{fetch.transfer_id, absl::AbortedError("preempted"), true}},
      {"call", CallMsg{fetch.transfer_id, "lookup", 30000, fields}},
      {"reply", ReplyMsg{fetch.transfer_id, absl::OkStatus(), fields}},
      {"reply_error", ReplyMsg{78, absl::NotFoundError("no such function"), {}}},
      {"ping", PingMsg{}},
      {"pong", PongMsg{}},
      {"bye", ByeMsg{}},
  };
  std::vector<std::pair<std::string, Message>> samples;
  for (const auto& [name, body] : bodies) {
    const bool stranger = name.starts_with("hello") || name == "refuse";
    samples.emplace_back(
        name,
        Message{0x1111222233334444, stranger ? uint64_t{0} : uint64_t{0x5555666677778888}, body});
  }
  return samples;
}

// Everything that a message says, for comparison.
std::string Describe(const Message& message);

}  // namespace kvferry
