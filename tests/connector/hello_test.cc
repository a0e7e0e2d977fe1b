// Peers that do not fit: refused at hello, and both sides' logs say which field differed and what
// to do.

#include <gtest/gtest.h>

#include <memory>

#include "tests/support/captured_log.h"
#include "tests/support/endpoints.h"
#include "tests/support/raw_peer.h"
#include "transport/control/codec.h"
#include "transport/node.h"

namespace kvferry {
namespace {

class Hello : public testing::Test {
 protected:
  // A decode endpoint with this model and layout is refused with all of `parts`, in its handle and
  // in both logs; a good one is served afterwards.
  void ExpectRefused(const std::string& model, const KvLayout& layout,
                     const std::vector<absl::string_view>& parts) {
    const auto target = MakePatternPool(layout, 8, 2);
    const auto decode = MakeDecode(target, SmallChunks(), model);
    const Ticket ticket = Publish(*prefill_, *source_, {1, 2});
    const auto handle = Fetch(*decode, ticket, {3, 4});
    const absl::Status status = handle->Wait(Soon());
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status.ToString();
    for (const absl::string_view part : parts) {
      EXPECT_NE(status.message().find(part), std::string::npos)
          << part << " in " << status.ToString();
    }
    EXPECT_TRUE(IsUntouched(*target, 2));
    std::vector<absl::string_view> prefill_line = parts;
    prefill_line.push_back("refused peer 'decode'");
    EXPECT_TRUE(log_.Has(prefill_line)) << log_.ToString();
    std::vector<absl::string_view> decode_line = parts;
    decode_line.push_back("ended: FAILED_PRECONDITION: refused by tcp://127.0.0.1");
    EXPECT_TRUE(log_.Has(decode_line)) << log_.ToString();
    EXPECT_EQ(Metric(*prefill_, "hellos_refused"), 1);
    EXPECT_EQ(Metric(*prefill_, "peers"), 0);

    const auto good_target = MakePatternPool(SmallLayout(), 8, 3);
    const auto good = MakeDecode(good_target, SmallChunks());
    EXPECT_TRUE(IsOk(Fetch(*good, ticket, {5, 6})->Wait(Soon())));
    EXPECT_TRUE(
        HoldsExactly(*good_target, 3, std::vector<int64_t>{5, 6}, 1, std::vector<int64_t>{1, 2}));
  }

  CapturedLog log_;
  std::shared_ptr<KvPool> source_ = MakePatternPool(SmallLayout(), 8, 1);
  std::unique_ptr<PrefillEndpoint> prefill_ = MakePrefill(source_, SmallChunks());
};

TEST_F(Hello, AnotherModel) {
  ExpectRefused(
      "other/model", SmallLayout(),
      {"model: 'test/model' here, 'other/model' there", "start both sides with the same model"});
}

// Over a network one side would listen for what the other never sends.
TEST_F(Hello, AnotherNetwork) {
  Config config = SmallChunks();
  config.same_host_path = "network";
  config.ucx_tls = PathUnderTest() == TestPath::kUcx ? "" : "tcp";
  const auto target = MakePatternPool(SmallLayout(), 8, 2);
  const auto decode = MakeDecode(target, config);
  const absl::Status status =
      Fetch(*decode, Publish(*prefill_, *source_, {1, 2}), {3, 4})->Wait(Soon());
  EXPECT_TRUE(Fails(status, absl::StatusCode::kFailedPrecondition, "ucx_tls", "over TCP"));
  EXPECT_TRUE(Fails(status, absl::StatusCode::kFailedPrecondition, "UCX"));
  EXPECT_TRUE(IsUntouched(*target, 2));
}

// Values are cast, bytes of an engine's own are not.
TEST_F(Hello, AnotherDtypeThatIsNoNumbers) {
  KvLayout layout = SmallLayout();
  layout.dtype = DType::kUint8;
  ExpectRefused(kTestModel, layout,
                {"KV layout: dtype: bfloat16 here, uint8 there",
                 "values of 'k' are not cast between bfloat16 and uint8", "start both sides"});
}

// And not those that lie nobody else knows how.
TEST_F(Hello, AnotherDtypeInAnArrangementOfAnEnginesOwn) {
  KvLayout layout = SmallLayout();
  layout.dtype = DType::kFloat16;
  layout.page_format = "engine's-HND";
  ExpectRefused(kTestModel, layout,
                {"KV layout: dtype: bfloat16 here, float16 there",
                 "engine's-HND is an arrangement of an engine's own, which may be another one",
                 "start both sides"});
}

// Of orders that are known they are converted; an engine's own only fits itself.
TEST_F(Hello, AnotherPageSizeOfAnArrangementOfAnEnginesOwn) {
  KvLayout layout = SmallLayout();
  layout.page_size = 32;
  layout.page_format = "vllm-cpu-neon-HND";
  ExpectRefused(
      kTestModel, layout,
      {"page_size: 16 here, 32 there", "vllm-cpu-neon-HND is an arrangement of an engine's own",
       "only pages of NHD and HND are converted", "start both sides"});
}

// A peer of before there were other pages would not say which it wants, and one that keeps pages
// for others to ask for counts in its own.
TEST_F(Hello, OtherPagesOfPeersThatConvertNone) {
  HelloMsg hello{"by hand", kTestModel, SmallLayout(), {"", "", {}, "", {1}, 7}};
  const auto answer_to = [&](const HelloMsg& said) {
    RawDecode peer(prefill_->address());
    peer.Send({42, 0, said});
    const std::optional<Message> answer = peer.Receive(Soon());
    if (!answer.has_value()) return absl::UnknownError("no answer");
    const auto* refuse = std::get_if<RefuseMsg>(&answer->body);
    return refuse == nullptr ? absl::OkStatus() : refuse->status;
  };
  const absl::Status as_is =
      answer_to(hello);  // Where the network is UCX's it is refused for that.
  const bool over_tcp = as_is.ok();
  EXPECT_EQ(over_tcp, PathUnderTest() != TestPath::kUcx) << as_is;
  for (const auto& [page_size, format] :
       std::vector<std::pair<int64_t, std::string>>{{32, "NHD"}, {16, "HND"}, {8, "HND"}}) {
    hello.layout.page_size = page_size;
    hello.layout.page_format = format;
    hello.converts = false;
    EXPECT_TRUE(Fails(answer_to(hello), absl::StatusCode::kFailedPrecondition,
                      "the other side converts no pages", "page_"));
    hello.converts = true;
    EXPECT_EQ(answer_to(hello).ok(), over_tcp);
  }
  // So it is with values.
  hello.layout.dtype = DType::kFloat16;
  EXPECT_TRUE(Fails(answer_to(hello), absl::StatusCode::kFailedPrecondition, "dtype: bfloat16 here",
                    "the other side casts no values"));
  hello.casts = true;
  EXPECT_EQ(answer_to(hello).ok(), over_tcp);
  // Everything else has to be the same as ever.
  hello.layout.num_layers = 5;
  EXPECT_TRUE(Fails(answer_to(hello), absl::StatusCode::kFailedPrecondition, "num_layers: 4 here"));
}

TEST_F(Hello, OtherPagesOfAnEndpointThatConvertsNone) {
  const auto node =
      Must(Node::Start({SmallChunks(), kTestModel, "keeper", source_, nullptr, nullptr, true}));
  KvLayout layout = SmallLayout();
  layout.page_size = 32;
  const auto target = MakePatternPool(layout, 8, 2);
  const auto decode = MakeDecode(target, SmallChunks());
  const Ticket ticket{node->listen_address(), node->epoch(), 6, 2, 32};
  EXPECT_TRUE(Fails(Fetch(*decode, ticket, {1})->Wait(Soon()),
                    absl::StatusCode::kFailedPrecondition, "page_size: 16 here, 32 there",
                    "counts in pages like its own alone"));
  EXPECT_EQ(Metric(*node, "hellos_refused"), 1);
  KvLayout other_dtype = SmallLayout();
  other_dtype.dtype = DType::kFloat16;
  const auto caster = MakeDecode(MakePatternPool(other_dtype, 8, 2), SmallChunks());
  EXPECT_TRUE(Fails(Fetch(*caster, ticket, {1})->Wait(Soon()),
                    absl::StatusCode::kFailedPrecondition, "dtype: bfloat16 here, float16 there",
                    "this endpoint gives out values as they are"));
  // Or of one that could, and whose owner counts otherwise.
  EndpointOptions options{SmallChunks(), kTestModel, "decode"};
  options.converts_pages = false;
  const auto counts = Must(DecodeEndpoint::Create(target, options));
  EXPECT_TRUE(Fails(Fetch(*counts, Publish(*prefill_, *source_, {1, 2}), {1})->Wait(Soon()),
                    absl::StatusCode::kFailedPrecondition, "page_size: 16 here, 32 there",
                    "the other side converts no pages"));
  const auto prefill = Must(PrefillEndpoint::Create(source_, options));
  EXPECT_TRUE(Fails(prefill->Push({"tcp://127.0.0.1:1", 5, 6, 1, 32}, {{1, 2}}, 0).status(),
                    absl::StatusCode::kFailedPrecondition, "of 1 pages, the push of 2"));
}

// The prefill side dials to push: it is the one that has to say that it converts and casts.
TEST(HelloToOthers, SaysThatItConvertsInEitherDirection) {
  RawPrefill peer;
  const auto pool = MakePatternPool(SmallLayout(), 8, 3);
  const auto converts = [&] {
    const auto hello = peer.Receive(Soon());
    if (!hello.has_value()) return false;
    const auto& said = std::get<HelloMsg>(hello->second.body);
    return said.converts && said.casts;
  };
  const auto decode = MakeDecode(pool, SmallChunks());
  const auto handle = Fetch(*decode, Ticket{peer.address(), 5, 6, 1, 16}, {0});
  EXPECT_TRUE(converts());
  const auto prefill = MakePrefill(pool, SmallChunks());
  const auto push = Push(*prefill, ReceiveTicket{peer.address(), 5, 6, 1, 16}, *pool, {0});
  EXPECT_TRUE(converts());
}

TEST_F(Hello, AnotherNumberOfLayers) {
  KvLayout layout = SmallLayout();
  layout.num_layers = 5;
  ExpectRefused(kTestModel, layout, {"num_layers: 4 here, 5 there", "start both sides"});
}

TEST_F(Hello, AnotherPageFormat) {
  KvLayout layout = SmallLayout();
  layout.page_format = "engine's-HND";
  ExpectRefused(kTestModel, layout,
                {"page_format: NHD here, engine's-HND there", "start both sides"});
}

TEST_F(Hello, OtherTensors) {
  ExpectRefused(
      kTestModel, KvLayout::Mha(4, 16, 4, 16, DType::kBFloat16),
      {"tensors: k[2 heads x 32]+v[2 heads x 32] here, k[4 heads x 16]+v[4 heads x 16] there",
       "start both sides"});
}

TEST(HelloFromOthers, HeadsThatTheModelHasNot) {
  const auto prefill = MakePrefill(MakePatternPool(SmallLayout(), 8, 1), SmallChunks());
  RawDecode peer(prefill->address());
  HelloMsg hello{"by hand", kTestModel, SmallLayout(), {"", "", {}, "", {1}, 7}};
  hello.heads = {1, SmallLayout().num_heads()};
  peer.Send({42, 0, hello});
  const auto refused = peer.Receive(Soon());
  ASSERT_TRUE(refused.has_value() && std::holds_alternative<RefuseMsg>(refused->body));
  EXPECT_TRUE(Fails(std::get<RefuseMsg>(refused->body).status, absl::StatusCode::kInvalidArgument,
                    "not within the model's"));
}

// A decode process of a later release, against a prefill process of this one.
TEST_F(Hello, DecodeSideOfAnotherVersion) {
  RawDecode peer(prefill_->address());
  const Message hello{42, 0, HelloMsg{"later", kTestModel, SmallLayout(), {"address"}}};
  peer.SendFrames({WithVersion(EncodeMessage(hello), 2)});
  const std::optional<Message> answer = peer.Receive(Soon());
  ASSERT_TRUE(answer.has_value());
  const auto* refuse = std::get_if<RefuseMsg>(&answer->body);
  ASSERT_NE(refuse, nullptr);
  EXPECT_EQ(refuse->transfer_id, 0u);
  EXPECT_EQ(answer->from_epoch, prefill_->epoch());
  EXPECT_TRUE(Fails(refuse->status, absl::StatusCode::kFailedPrecondition,
                    "protocol version: 1 here, 2 there",
                    "run the same kvferry release on both sides"));
  EXPECT_TRUE(log_.Has({"protocol version: 1 here, 2 there", "run the same kvferry release"}))
      << log_.ToString();
  const auto target = MakePatternPool(SmallLayout(), 8, 3);
  const auto good = MakeDecode(target, SmallChunks());
  EXPECT_TRUE(IsOk(Fetch(*good, Publish(*prefill_, *source_, {1}), {5})->Wait(Soon())));
}

// A decode process of this release, against a prefill process of a later one, which refuses in its
// own version: a refusal is understood across versions.
TEST(HelloToOthers, PrefillSideOfAnotherVersionRefuses) {
  CapturedLog log;
  RawPrefill prefill;
  const auto target = MakePatternPool(SmallLayout(), 8, 3);
  const auto decode = MakeDecode(target, SmallChunks());
  const auto handle = Fetch(*decode, Ticket{prefill.address(), 5, 6, 1, 16}, {0});
  const auto hello = prefill.Receive(Soon());
  ASSERT_TRUE(hello.has_value());
  ASSERT_TRUE(std::holds_alternative<HelloMsg>(hello->second.body));
  EXPECT_EQ(hello->second.to_epoch, 0u);
  const Message refuse{
      5, 0, RefuseMsg{0, absl::FailedPreconditionError("protocol version: 2 here, 1 there")}};
  prefill.SendBytes(hello->first, WithVersion(EncodeMessage(refuse), 2));
  EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kFailedPrecondition, "refused by",
                    prefill.address(), "protocol version: 2 here, 1 there"));
  EXPECT_TRUE(log.Has({"ended", "protocol version: 2 here, 1 there"})) << log.ToString();
}

// The same, when the later one welcomes instead.
TEST(HelloToOthers, PrefillSideOfAnotherVersionWelcomes) {
  RawPrefill prefill;
  const auto target = MakePatternPool(SmallLayout(), 8, 3);
  const auto decode = MakeDecode(target, SmallChunks());
  const auto handle = Fetch(*decode, Ticket{prefill.address(), 5, 6, 1, 16}, {0});
  const auto hello = prefill.Receive(Soon());
  ASSERT_TRUE(hello.has_value());
  const Message welcome{5, hello->second.from_epoch, WelcomeMsg{"later", {"address"}}};
  prefill.SendBytes(hello->first, WithVersion(EncodeMessage(welcome), 2));
  EXPECT_TRUE(Fails(handle->Wait(Soon()), absl::StatusCode::kFailedPrecondition,
                    "protocol version: 1 here, 2 there"));
}

TEST_F(Hello, OfPeersWithoutANameTheLogSaysSo) {
  RawDecode peer(prefill_->address());
  peer.Send({42, 0, HelloMsg{"", "other/model", SmallLayout(), {"", "", {}, "", {1}, 7}}});
  ASSERT_TRUE(peer.Receive(Soon()).has_value());
  EXPECT_TRUE(log_.Has({"refused peer without a name: ", "model"})) << log_.ToString();
}

// Names that peers choose end up in logs; they must not be able to forge a line of one.
TEST_F(Hello, LogsStayOnOneLine) {
  testing::internal::CaptureStderr();
  RawDecode peer(prefill_->address());
  KvLayout layout = SmallLayout();
  layout.page_format = "NHD\nforged format";
  peer.Send({42, 0, HelloMsg{"x\nforged name", "y\nforged model", layout, {"address"}}});
  ASSERT_TRUE(peer.Receive(Soon()).has_value());
  peer.Send({42, 0, HelloMsg{"x", kTestModel, layout, {"address"}}});
  ASSERT_TRUE(peer.Receive(Soon()).has_value());
  const std::string stderr_text = testing::internal::GetCapturedStderr();
  EXPECT_NE(stderr_text.find("y\\x0aforged model"), std::string::npos) << stderr_text;
  EXPECT_NE(stderr_text.find("NHD\\x0aforged format"), std::string::npos) << stderr_text;
  EXPECT_EQ(stderr_text.find("\nforged"), std::string::npos) << stderr_text;
}

}  // namespace
}  // namespace kvferry
