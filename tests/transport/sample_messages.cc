#include "tests/transport/sample_messages.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace kvferry {
namespace {

std::string Describe(const Fields& fields) {
  std::string text;
  for (const auto& [name, value] : fields.values()) {
    absl::StrAppend(&text, " ", name, "=");
    if (const auto* number = std::get_if<uint64_t>(&value)) {
      absl::StrAppend(&text, *number);
    } else {
      absl::StrAppend(&text, "'", absl::CHexEscape(std::get<Fields::Text>(value).bytes), "'");
    }
  }
  return text;
}

std::string Describe(const DataAddresses& data) {
  std::string text = absl::CHexEscape(data.worker);
  if (!data.local.empty()) absl::StrAppend(&text, " local ", absl::CHexEscape(data.local));
  if (!data.direct.empty()) absl::StrAppend(&text, " direct ", absl::CHexEscape(data.direct));
  if (data.tcp.lanes > 0) {
    absl::StrAppend(&text, " tcp ", data.tcp.lanes, " ", data.tcp.host, " ", data.tcp.port, " ",
                    absl::CHexEscape(data.tcp.token), " ", absl::CHexEscape(data.tcp.answer));
  }
  if (data.session != 0) absl::StrAppend(&text, " session ", data.session);
  for (const std::string& address : data.lanes) {
    absl::StrAppend(&text, " lane ", absl::CHexEscape(address));
  }
  return text;
}

std::string Describe(LeaseReader reader) {
  return reader == LeaseReader() ? "" : absl::StrCat(" reader ", reader.index, " of ", reader.of);
}

std::string Describe(const PageForm& form) {
  const char* const order = form.order == ValueOrder::kNhd   ? "NHD"
                            : form.order == ValueOrder::kHnd ? "HND"
                                                             : "the sender's order";
  return absl::StrCat(" in pages of ", form.page_size, " ", order);
}

std::string Describe(const ValueFormat& values) {
  std::string text;
  for (const DType dtype : values.dtypes) absl::StrAppend(&text, " as ", DTypeName(dtype));
  for (const float scale : values.scales) absl::StrAppend(&text, " x ", scale);
  return text;
}

struct Describer {
  std::string operator()(const HelloMsg& m) const {
    return absl::StrCat(
        "hello ", m.name, " ", m.model, " ", m.layout.ToString(), " ", Describe(m.data),
        m.heads.total == 0 ? "" : absl::StrCat(" from head ", m.heads.first, " of ", m.heads.total),
        m.converts ? " converts" : "", m.casts ? " casts" : "");
  }
  std::string operator()(const WelcomeMsg& m) const {
    return absl::StrCat("welcome ", m.name, " ", Describe(m.data),
                        m.silence_ms == 0 ? "" : absl::StrCat(" within ", m.silence_ms));
  }
  std::string operator()(const RefuseMsg& m) const {
    return absl::StrCat("refuse ", m.transfer_id, " ", m.status.ToString());
  }
  std::string operator()(const FetchMsg& m) const {
    const auto run = [](std::string* out, const PageRun& r) {
      absl::StrAppend(out, r.first, "x", r.count);
    };
    return absl::StrCat(
        "fetch ", m.transfer_id, " ", m.lease_id, " [", absl::StrJoin(m.positions.runs(), ",", run),
        "] ", m.timeout_ms, " ", m.window_bytes, " ", m.chunk_bytes, " ", m.checksum,
        m.tail_bytes == 0 ? "" : absl::StrCat(" tail ", m.tail_bytes),
        m.in_place_bytes == kBytesInPlace ? "" : absl::StrCat(" in place ", m.in_place_bytes),
        m.replaces == 0 ? "" : absl::StrCat(" replaces ", m.replaces),
        m.attempt == 0 ? "" : absl::StrCat(" attempt ", m.attempt),
        m.from_bytes == 0 ? "" : absl::StrCat(" from ", m.from_bytes),
        m.wait_ms == 0 ? "" : absl::StrCat(" wait ", m.wait_ms),
        m.heads.count == 0 ? "" : absl::StrCat(" heads ", m.heads.first, "+", m.heads.count),
        Describe(m.reader), m.form == PageForm() ? "" : Describe(m.form), Describe(m.values),
        m.reads.possible() ? absl::StrCat(" reads ", m.reads.read_ns, " ", m.reads.mib_ns) : "");
  }
  std::string operator()(const DoneMsg& m) const {
    return absl::StrCat("done ", m.transfer_id, " ", m.lease_id, " ", m.bytes, Describe(m.reader));
  }
  std::string operator()(const CancelMsg& m) const {
    return absl::StrCat("cancel ", m.transfer_id, " ", m.reason);
  }
  std::string operator()(const AbortMsg& m) const {
    return absl::StrCat("abort ", m.transfer_id, " ", m.status.ToString(), m.again ? " again" : "");
  }
  std::string operator()(const CallMsg& m) const {
    return absl::StrCat("call ", m.call_id, " ", m.function, " ", m.timeout_ms, Describe(m.args));
  }
  std::string operator()(const ReplyMsg& m) const {
    return absl::StrCat("reply ", m.call_id, " ", m.status.ToString(), Describe(m.result));
  }
  std::string operator()(const PingMsg&) const { return "ping"; }
  std::string operator()(const PongMsg&) const { return "pong"; }
  std::string operator()(const ByeMsg&) const { return "bye"; }
};

}  // namespace

std::string Describe(const Message& message) {
  return absl::StrCat(message.from_epoch, " -> ", message.to_epoch, ": ",
                      std::visit(Describer(), message.body));
}

}  // namespace kvferry
