#include "transport/control/codec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <msgpack.hpp>

#include "base/utf8.h"
#include "tests/support/raw_peer.h"
#include "tests/transport/sample_messages.h"

namespace kvferry {
namespace {

absl::StatusOr<Message> Decode(const std::string& bytes) {
  return DecodeMessage(std::as_bytes(std::span(bytes)));
}

FetchMsg ShortestFetch() {
  FetchMsg message;
  message.transfer_id = message.lease_id = 1;
  message.timeout_ms = message.window_bytes = message.chunk_bytes = 1;
  return message;
}

// Packs a ping by hand, so that one thing can be added or changed.
class HandMade {
 public:
  explicit HandMade(uint32_t keys) { packer_.pack_map(keys); }
  template <typename T>
  HandMade& Add(const std::string& key, const T& value) {
    packer_.pack(key);
    packer_.pack(value);
    return *this;
  }
  HandMade& Head(const std::string& type, uint64_t version = 1, uint64_t epoch = 7) {
    return Add("v", version).Add("t", type).Add("e", epoch).Add("to", uint64_t{9});
  }
  msgpack::packer<msgpack::sbuffer>& packer() { return packer_; }
  std::string bytes() const { return {buffer_.data(), buffer_.size()}; }

 private:
  msgpack::sbuffer buffer_;
  msgpack::packer<msgpack::sbuffer> packer_{buffer_};
};

TEST(Codec, RoundTripOfEachMessage) {
  for (const auto& [name, message] : SampleMessages()) {
    const absl::StatusOr<Message> decoded = Decode(EncodeMessage(message));
    ASSERT_TRUE(IsOk(decoded)) << name;
    EXPECT_EQ(Describe(*decoded), Describe(message));
  }
}

// Python, which reads them, takes nothing else.
TEST(Codec, MessagesForPeopleAreUtf8) {
  const auto told = [](const std::string& text) {
    const Message refusal{7, 9, RefuseMsg{1, absl::NotFoundError(text)}};
    return std::string(
        std::get<RefuseMsg>(Must(Decode(EncodeMessage(refusal))).body).status.message());
  };
  EXPECT_EQ(told("no \xff\xfe"), "no \ufffd\ufffd");
  const std::string long_text = std::string(kMaxTextBytes - 1, 'x');
  EXPECT_EQ(told(long_text + "ä"), long_text);
  const std::string bad = told(std::string(kMaxTextBytes, '\xff'));
  EXPECT_LE(bad.size(), kMaxTextBytes);
  EXPECT_EQ(ValidUtf8(bad), bad);
}

TEST(Codec, ExtremesRoundTrip) {
  FetchMsg fetch;
  fetch.transfer_id = fetch.lease_id = UINT64_MAX;
  fetch.positions = Must(PageRuns::FromRuns(std::vector<PageRun>{{PageRuns::kMaxPages, 1}}));
  fetch.timeout_ms = fetch.window_bytes = fetch.chunk_bytes = int64_t{1} << 50;
  const Message message{UINT64_MAX, UINT64_MAX, fetch};
  EXPECT_EQ(Describe(Must(Decode(EncodeMessage(message)))), Describe(message));
}

TEST(Codec, AsManyRunsAsAllowed) {
  std::vector<PageRun> runs;
  for (int64_t i = 0; i < static_cast<int64_t>(kMaxRuns); ++i) {
    runs.push_back({(PageRuns::kMaxPages - 1) - 3 * i, 1});
  }
  FetchMsg fetch;
  fetch.transfer_id = fetch.lease_id = UINT64_MAX;
  fetch.positions = Must(PageRuns::FromRuns(runs));
  fetch.timeout_ms = fetch.window_bytes = fetch.chunk_bytes = 1;
  const std::string bytes = EncodeMessage({1, 2, fetch});
  EXPECT_LE(bytes.size(), kMaxMessageBytes);
  EXPECT_TRUE(IsOk(Decode(bytes)));
  runs.push_back({0, 1});
  fetch.positions = Must(PageRuns::FromRuns(runs));
  EXPECT_TRUE(Fails(Decode(EncodeMessage({1, 2, fetch})), absl::StatusCode::kInvalidArgument));
}

TEST(Codec, LongTextsAreCut) {
  const absl::Status decoded =
      std::get<AbortMsg>(Must(Decode(EncodeMessage(
                                  {1, 2, AbortMsg{3, absl::AbortedError(std::string(5000, 'x'))}})))
                             .body)
          .status;
  EXPECT_EQ(decoded, absl::AbortedError(std::string(kMaxTextBytes, 'x')));
}

TEST(Codec, UnknownKeysAreIgnored) {
  HandMade message(7);
  message.Head("ping").Add("later", std::string("x")).Add("list", std::vector<int>{1, 2});
  message.packer().pack(5);  // A key that is no string.
  message.packer().pack_nil();
  EXPECT_TRUE(IsOk(Decode(message.bytes())));
}

TEST(Codec, AnotherVersionNamesBoth) {
  for (const auto& [name, message] : SampleMessages()) {
    const absl::StatusOr<Message> decoded = Decode(WithVersion(EncodeMessage(message), 9));
    if (name == "refuse" || name == "refuse_fetch") {
      EXPECT_TRUE(IsOk(decoded)) << "a refusal is understood across versions";
    } else {
      EXPECT_TRUE(Fails(decoded, absl::StatusCode::kFailedPrecondition,
                        "protocol version: 1 here, 9 there"))
          << name;
    }
  }
  // Even when nothing else in it makes sense here.
  EXPECT_TRUE(Fails(Decode(HandMade(4).Head("a new type", 2).bytes()),
                    absl::StatusCode::kFailedPrecondition));
}

// Whatever else that says, and however long it is.
TEST(Codec, ConnectionsOfAnotherVersionAreAsIfThereWereNone) {
  HelloMsg hello{"n", "m", KvLayout::Mha(1, 16, 1, 8, DType::kUint8), {}};
  hello.data.tcp.lanes = 1;
  std::string bytes = EncodeMessage({1, 0, hello});
  const std::string key = "\xa3tcp\x82\xa1v";
  const size_t at = bytes.find(key);
  ASSERT_NE(at, std::string::npos);
  bytes[at + key.size()] = 9;
  const Message decoded = Must(Decode(bytes));
  EXPECT_EQ(std::get<HelloMsg>(decoded.body).data.tcp.lanes, 0);
  // But which version that is has to be said.
  bytes[at + key.size()] = '\xc0';
  EXPECT_TRUE(Fails(Decode(bytes), absl::StatusCode::kInvalidArgument, "'v' has the wrong type"));
  bytes[at + key.size()] = 1;
  bytes[at + key.size() - 1] = 'w';
  EXPECT_TRUE(Fails(Decode(bytes), absl::StatusCode::kInvalidArgument, "no 'v'"));
}

TEST(Codec, WhatIsWrongIsNamed) {
  const auto expect = [](const std::string& bytes, absl::string_view part) {
    EXPECT_TRUE(
        Fails(Decode(bytes), absl::StatusCode::kInvalidArgument, "malformed message", part));
  };
  expect(HandMade(4).Head("nonsense").bytes(), "unknown type 'nonsense'");
  expect(HandMade(4).Head("a type of seventeen").bytes(), "limit 16");
  expect(HandMade(4).Head("ping", 1, 0).bytes(), "'e' is 0");
  expect(HandMade(1).Add("v", 1).bytes(), "no 't'");
  expect(HandMade(1).Add("v", -1).bytes(), "'v' has the wrong type");
  expect(HandMade(1).Add("v", std::string("1")).bytes(), "'v' has the wrong type");
  expect(HandMade(6).Head("cancel").Add("id", 0).Add("msg", std::string()).bytes(), "'id' is 0");
  expect(HandMade(6).Head("cancel").Add("id", 1).Add("msg", 5).bytes(), "'msg' has the wrong type");
  expect(HandMade(7).Head("abort").Add("id", 1).Add("code", 0).Add("msg", std::string()).bytes(),
         "'code' is 0");
  expect(HandMade(7).Head("abort").Add("id", 1).Add("code", 17).Add("msg", std::string()).bytes(),
         "'code' is 17");
  expect("", "");
  expect("\x93\x01\x02\x03", "not a map");
  expect(EncodeMessage({1, 2, PingMsg{}}) + "x", "bytes after its end");
}

TEST(Codec, RunsThatCannotBe) {
  const auto with_runs = [](const std::vector<uint64_t>& runs) {
    return Decode(HandMade(11)
                      .Head("fetch")
                      .Add("id", 1)
                      .Add("lease", 1)
                      .Add("runs", runs)
                      .Add("ms", 1)
                      .Add("window", 1)
                      .Add("chunk", 1)
                      .Add("sum", false)
                      .bytes())
        .status();
  };
  const uint64_t max = PageRuns::kMaxPages;
  EXPECT_TRUE(IsOk(with_runs({0, 1, 5, 2})));
  EXPECT_TRUE(IsOk(with_runs({})));
  EXPECT_TRUE(Fails(with_runs({1}), absl::StatusCode::kInvalidArgument, "odd"));
  EXPECT_TRUE(Fails(with_runs({0, 0}), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Fails(with_runs({max + 1, 1}), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Fails(with_runs({0, max + 1}), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Fails(with_runs({0, max, 0, max}), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Fails(with_runs({UINT64_MAX, 1}), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Fails(with_runs({0, UINT64_MAX}), absl::StatusCode::kInvalidArgument));
}

TEST(Codec, HeadsAndReadersThatCannotBe) {
  const auto done = [](uint64_t reader, uint64_t readers) {
    return Decode(HandMade(9)
                      .Head("done")
                      .Add("id", 1)
                      .Add("lease", 1)
                      .Add("bytes", 0)
                      .Add("reader", reader)
                      .Add("readers", readers)
                      .bytes())
        .status();
  };
  EXPECT_TRUE(IsOk(done(0, 1)));
  EXPECT_TRUE(IsOk(done(63, 64)));
  EXPECT_TRUE(Fails(done(2, 2), absl::StatusCode::kInvalidArgument, "'reader' is 2"));
  EXPECT_TRUE(Fails(done(0, 0), absl::StatusCode::kInvalidArgument, "'readers' is 0"));
  EXPECT_TRUE(Fails(done(0, 65), absl::StatusCode::kInvalidArgument, "'readers' is 65"));
  EXPECT_TRUE(Fails(done(UINT64_MAX, 64), absl::StatusCode::kInvalidArgument, "'reader'"));
  const auto fetch = [](HeadRange heads) {
    FetchMsg message = ShortestFetch();
    message.heads = heads;
    return Decode(EncodeMessage({1, 2, message})).status();
  };
  EXPECT_TRUE(IsOk(fetch({KvLayout::kMaxHeads, KvLayout::kMaxHeads})));
  EXPECT_TRUE(Fails(fetch({-1, 2}), absl::StatusCode::kInvalidArgument, "'head'"));
  EXPECT_TRUE(
      Fails(fetch({0, KvLayout::kMaxHeads + 1}), absl::StatusCode::kInvalidArgument, "'heads'"));
}

TEST(Codec, FormsThatCannotBe) {
  const auto fetch = [](const PageForm& form) {
    FetchMsg message = ShortestFetch();
    message.form = form;
    return EncodeMessage({1, 2, message});
  };
  EXPECT_TRUE(IsOk(Decode(fetch({1, ValueOrder::kNhd}))));
  EXPECT_TRUE(IsOk(Decode(fetch({KvLayout::kMaxPageSize, ValueOrder::kHnd}))));
  for (const int64_t page_size : {KvLayout::kMaxPageSize + 1, int64_t{-1}}) {
    EXPECT_TRUE(Fails(Decode(fetch({page_size, ValueOrder::kNhd})),
                      absl::StatusCode::kInvalidArgument, "'page'"));
  }
  std::string other = fetch({16, ValueOrder::kNhd});
  other.replace(other.find("NHD"), 3, "NDH");
  EXPECT_TRUE(Fails(Decode(other), absl::StatusCode::kInvalidArgument, "'format' is neither"));
  std::string of_none = fetch({16, ValueOrder::kNhd});
  const size_t page = of_none.find("page") + 4;
  of_none[page] = 0;
  EXPECT_TRUE(Fails(Decode(of_none), absl::StatusCode::kInvalidArgument, "'page' is 0"));
  of_none[page] = '\xc0';
  EXPECT_TRUE(Fails(Decode(of_none), absl::StatusCode::kInvalidArgument, "wrong type"));
}

TEST(Codec, ValuesThatCannotBe) {
  const auto with = [](const ValueFormat& values) {
    FetchMsg message = ShortestFetch();
    message.values = values;
    return EncodeMessage({1, 2, message});
  };
  const auto refused = [](const std::string& bytes, absl::string_view why) {
    return Fails(Decode(bytes), absl::StatusCode::kInvalidArgument, "malformed message", why);
  };
  const auto most = static_cast<size_t>(KvLayout::kMaxLayers * KvLayout::kMaxTensors);
  const std::vector<DType> dtypes(KvLayout::kMaxTensors, DType::kFloat8E5M2);
  EXPECT_TRUE(IsOk(Decode(with({dtypes, std::vector<float>(most, 1e30F)}))));
  EXPECT_TRUE(refused(with({std::vector<DType>(17, DType::kFloat32), {}}), "'dtypes' has 17"));
  EXPECT_TRUE(
      refused(with({dtypes, std::vector<float>(most + 1, 1)}), "'scales' has 262148 bytes"));
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float scale : {0.0F, -1.0F, infinity, std::nanf("")}) {
    EXPECT_TRUE(refused(with({dtypes, {1, scale}}), "'scales' holds something that is not finite"));
  }
  std::string other = with({{DType::kFloat32}, {}});
  other.replace(other.find("float32"), 7, "float31");
  EXPECT_TRUE(refused(other, "dtype 'float31' is not one of"));
  const auto by_hand = [](const std::string& key, const auto& value) {
    HandMade fetch(12);
    for (const char* const number : {"id", "lease", "ms", "window", "chunk"}) fetch.Add(number, 1);
    fetch.Head("fetch").Add("runs", std::vector<int>()).Add("sum", false).Add(key, value);
    return fetch.bytes();
  };
  EXPECT_TRUE(IsOk(Decode(by_hand("scales", std::vector<char>{0, 0, 0, 1}))));
  EXPECT_TRUE(refused(by_hand("scales", std::vector<char>{0, 0, 0, 1, 0}), "no list of float32"));
  EXPECT_TRUE(refused(by_hand("scales", std::vector<char>()), "no list of float32"));
  EXPECT_TRUE(refused(by_hand("scales", std::vector<float>{1}), "'scales' has the wrong type"));
  EXPECT_TRUE(refused(by_hand("dtypes", std::vector<int>{1}), "'dtypes' has the wrong type"));
}

TEST(Codec, TensorsOfTheirOwnDtype) {
  HelloMsg hello = std::get<HelloMsg>(SampleMessages()[0].second.body);
  hello.layout.tensors = {{"index_k", 1, 128, DType::kFloat8E4M3},
                          {"index_scale", 1, 1, DType::kFloat32},
                          {"latent", 1, 576}};
  const absl::StatusOr<Message> decoded = Decode(EncodeMessage({1, 0, hello}));
  ASSERT_TRUE(IsOk(decoded));
  EXPECT_EQ(std::get<HelloMsg>(decoded->body).layout, hello.layout);
}

TEST(Codec, FieldsOfACall) {
  const auto with = [](const std::function<void(msgpack::packer<msgpack::sbuffer>&)>& pack_args) {
    HandMade message(8);
    message.Head("call").Add("id", 1).Add("ms", 1).Add("fn", std::string("f"));
    message.packer().pack(std::string("args"));
    pack_args(message.packer());
    return Decode(message.bytes());
  };
  // What a later version may add is ignored.
  const absl::StatusOr<Message> decoded = with([](auto& packer) {
    packer.pack_map(4);
    packer.pack(std::string("number")).pack(5);
    packer.pack(std::string("text")).pack(std::string("x"));
    packer.pack(std::string("negative")).pack(-1);
    packer.pack(7).pack(8);
  });
  ASSERT_TRUE(IsOk(decoded));
  const Fields& args = std::get<CallMsg>(decoded->body).args;
  EXPECT_EQ(args.values().size(), 1u);
  EXPECT_EQ(*args.Uint("number"), 5u);
  EXPECT_TRUE(Fails(args.Uint("number", 4), absl::StatusCode::kInvalidArgument, "'number' is 5"));
  EXPECT_TRUE(Fails(args.Uint("text"), absl::StatusCode::kInvalidArgument, "'text' is missing"));
  EXPECT_TRUE(Fails(args.Bytes("number"), absl::StatusCode::kInvalidArgument, "no byte string"));
  EXPECT_TRUE(Fails(with([](auto& packer) {
                      packer.pack_map(17);
                      for (int i = 0; i < 17; ++i) packer.pack(std::to_string(i)).pack(i);
                    }),
                    absl::StatusCode::kInvalidArgument, "17 fields in one message, limit 16"));
  EXPECT_TRUE(Fails(with([](auto& packer) {
                      packer.pack_map(1);
                      packer.pack(std::string(33, 'x')).pack(1);
                    }),
                    absl::StatusCode::kInvalidArgument, "name above 32 bytes"));
}

TEST(Codec, TheLargestFieldsFitIntoAMessage) {
  CallMsg call{1, "f", 1, {}};
  call.args.Set("a", std::string(Fields::kMaxTotalBytes - 1, 'x'));
  ASSERT_TRUE(IsOk(call.args.Check()));
  EXPECT_TRUE(IsOk(Decode(EncodeMessage({1, 2, call}))));
  call.args.Set("bb", std::string());
  EXPECT_TRUE(Fails(call.args.Check(), absl::StatusCode::kInvalidArgument, "limit"));
  EXPECT_TRUE(Fails(Decode(EncodeMessage({1, 2, call})), absl::StatusCode::kInvalidArgument));
}

TEST(Codec, LayoutsThatCannotBe) {
  const auto with = [](void (*change)(HelloMsg&)) {
    HelloMsg hello = std::get<HelloMsg>(SampleMessages()[0].second.body);
    change(hello);
    return Decode(EncodeMessage({1, 0, hello})).status();
  };
  const auto refused = [](const absl::Status& status, absl::string_view part) {
    return Fails(status, absl::StatusCode::kInvalidArgument, "malformed message", part);
  };
  EXPECT_TRUE(IsOk(with([](HelloMsg&) {})));
  EXPECT_TRUE(refused(with([](HelloMsg& h) { h.layout.num_layers = 0; }), "'layers'"));
  EXPECT_TRUE(refused(with([](HelloMsg& h) { h.layout.num_layers = 4097; }), "'layers'"));
  EXPECT_TRUE(refused(with([](HelloMsg& h) { h.layout.page_size = -1; }), "'page_size'"));
  EXPECT_TRUE(refused(with([](HelloMsg& h) { h.layout.tensors.clear(); }), "number of tensors"));
  EXPECT_TRUE(refused(with([](HelloMsg& h) { h.layout.tensors.resize(17, h.layout.tensors[0]); }),
                      "'tensors' has 17"));
  EXPECT_TRUE(refused(with([](HelloMsg& h) { h.layout.tensors[1].head_dim = 0; }), "'dim'"));
  EXPECT_TRUE(refused(with([](HelloMsg& h) { h.layout.dtype = static_cast<DType>(99); }), "dtype"));
  EXPECT_TRUE(refused(with([](HelloMsg& h) {
                        h.layout.page_size = KvLayout::kMaxPageSize;
                        h.layout.tensors[0] = {"k", KvLayout::kMaxHeads, KvLayout::kMaxHeadDim};
                      }),
                      "bytes of a page"));
  EXPECT_TRUE(refused(with([](HelloMsg& h) { h.data.worker.assign(4097, 'x'); }), ""));
  EXPECT_TRUE(IsOk(with([](HelloMsg& h) { h.data.lanes.assign(7, "lane"); })));
  EXPECT_TRUE(
      refused(with([](HelloMsg& h) { h.data.lanes.assign(8, "lane"); }), "'lanes' has 8 elements"));
  EXPECT_TRUE(refused(with([](HelloMsg& h) { h.data.lanes = {std::string(4097, 'x')}; }),
                      "'lanes' has 4097 bytes"));
  EXPECT_TRUE(IsOk(with([](HelloMsg& h) { h.data.direct.assign(65536, 'x'); })));
  static const std::string token(16, 't');
  EXPECT_TRUE(IsOk(with([](HelloMsg& h) { h.data.tcp = {8, "::1", 1, token, token}; })));
  EXPECT_TRUE(refused(with([](HelloMsg& h) { h.data.tcp.lanes = 9; }), "'lanes' is 9"));
  EXPECT_TRUE(refused(with([](HelloMsg& h) {
                        h.data.tcp = {1, "::1", 65536, token, token};
                      }),
                      "'port' is 65536"));
  EXPECT_TRUE(refused(with([](HelloMsg& h) {
                        h.data.tcp = {1, "::1", 1, token, "short"};
                      }),
                      "'answer' has 5 bytes, not 16"));
  EXPECT_TRUE(refused(with([](HelloMsg& h) {
                        h.data.tcp = {1, "::1", 1, token + "x", token};
                      }),
                      "'token' has 17 bytes"));
  EXPECT_TRUE(refused(with([](HelloMsg& h) { h.data.direct.assign(65537, 'x'); }),
                      "'direct' has 65537 bytes"));
}

}  // namespace
}  // namespace kvferry
