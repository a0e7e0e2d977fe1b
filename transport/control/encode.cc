#include "transport/control/codec.h"

#include <cstdint>
#include <msgpack.hpp>
#include <string>
#include <string_view>
#include <variant>

#include "base/utf8.h"
#include "pool/kv_layout.h"

namespace kvferry {
namespace {

using Packer = msgpack::packer<msgpack::sbuffer>;

// A map is written as its size and then its entries; each PackBody announces how many it adds.
struct Writer {
  Packer& packer;

  void Key(std::string_view key) { packer.pack(key); }
  void Uint(std::string_view key, uint64_t value) {
    Key(key);
    packer.pack(value);
  }
  void Bool(std::string_view key, bool value) {
    Key(key);
    packer.pack(value);
  }
  void Text(std::string_view key, std::string_view value, size_t max_bytes) {
    Key(key);
    packer.pack(Utf8Prefix(value, max_bytes));
  }
  void Binary(std::string_view key, std::string_view value) {
    Key(key);
    BinaryValue(value);
  }
  void BinaryValue(std::string_view value) {
    packer.pack_bin(static_cast<uint32_t>(value.size()));
    packer.pack_bin_body(value.data(), static_cast<uint32_t>(value.size()));
  }
  void Status(const absl::Status& status) {
    Uint("code", static_cast<uint64_t>(status.code()));
    Text("msg", std::string_view(status.message().data(), status.message().size()), kMaxTextBytes);
  }
};

void PackLayout(Writer& writer, const KvLayout& layout) {
  writer.Key("layout");
  writer.packer.pack_map(5);
  writer.Uint("layers", layout.num_layers);
  writer.Uint("page_size", layout.page_size);
  writer.Text("dtype", std::string(DTypeName(layout.dtype)), KvLayout::kMaxNameBytes);
  writer.Text("format", layout.page_format, KvLayout::kMaxNameBytes);
  writer.Key("tensors");
  writer.packer.pack_array(static_cast<uint32_t>(layout.tensors.size()));
  for (const KvTensor& tensor : layout.tensors) {
    writer.packer.pack_map(tensor.dtype ? 4 : 3);
    writer.Text("name", tensor.name, KvLayout::kMaxNameBytes);
    writer.Uint("heads", tensor.num_heads);
    writer.Uint("dim", tensor.head_dim);
    if (tensor.dtype) {
      writer.Text("dtype", std::string(DTypeName(*tensor.dtype)), KvLayout::kMaxNameBytes);
    }
  }
}

void PackRuns(Writer& writer, const PageRuns& positions) {
  writer.Key("runs");
  writer.packer.pack_array(static_cast<uint32_t>(2 * positions.num_runs()));
  for (const PageRun run : positions.runs()) {
    writer.packer.pack(static_cast<uint64_t>(run.first));
    writer.packer.pack(static_cast<uint64_t>(run.count));
  }
}

void PackFields(Writer& writer, std::string_view key, const Fields& fields) {
  writer.Key(key);
  writer.packer.pack_map(static_cast<uint32_t>(fields.values().size()));
  for (const auto& [name, value] : fields.values()) {
    if (const auto* number = std::get_if<uint64_t>(&value)) {
      writer.Uint(name, *number);
    } else {
      writer.Binary(name, std::get<Fields::Text>(value).bytes);
    }
  }
}

// One row a message type: its name on the wire, the number of its own keys, and how to write them.
struct BodyWriter {
  Writer& writer;
  const Message& message;

  void Head(std::string_view type, uint32_t own_keys) const {
    writer.packer.pack_map(4 + own_keys);
    writer.Uint("v", kProtocolVersion);
    writer.Text("t", type, 16);
    writer.Uint("e", message.from_epoch);
    writer.Uint("to", message.to_epoch);
  }
  // Of a hello or a welcome: where its data planes are.
  static uint32_t NumAddresses(const DataAddresses& data) {
    return 1 + (data.local.empty() ? 0 : 1) + (data.lanes.empty() ? 0 : 1) +
           (data.direct.empty() ? 0 : 1) + (data.tcp.lanes == 0 ? 0 : 1) +
           (data.session == 0 ? 0 : 1);
  }
  // Without a port it only says that there are connections to be had.
  void Tcp(const TcpAddress& tcp) const {
    if (tcp.lanes == 0) return;
    writer.Key("tcp");
    writer.packer.pack_map(tcp.port == 0 ? 2 : 6);
    writer.Uint("v", kTcpVersion);
    writer.Uint("lanes", tcp.lanes);
    if (tcp.port == 0) return;
    writer.Text("host", tcp.host, kMaxHostBytes);
    writer.Uint("port", tcp.port);
    writer.Binary("token", tcp.token);
    writer.Binary("answer", tcp.answer);
  }
  void Addresses(const DataAddresses& data) const {
    writer.Binary("worker", data.worker);
    if (!data.local.empty()) writer.Binary("local", data.local);
    if (!data.direct.empty()) writer.Binary("direct", data.direct);
    Tcp(data.tcp);
    if (data.session != 0) writer.Uint("session", data.session);
    if (data.lanes.empty()) return;
    writer.Key("lanes");
    writer.packer.pack_array(static_cast<uint32_t>(data.lanes.size()));
    for (const std::string& address : data.lanes) writer.BinaryValue(address);
  }
  void Heads(int64_t first, int64_t number) const {
    if (number == 0) return;
    writer.Uint("head", first);
    writer.Uint("heads", number);
  }
  static uint32_t NumKeys(LeaseReader reader) { return reader.of == 1 ? 0 : 2; }
  void Whose(LeaseReader reader) const {
    if (reader.of == 1) return;
    writer.Uint("reader", reader.index);
    writer.Uint("readers", reader.of);
  }
  static uint32_t NumKeys(const PageForm& form) {
    return (form.page_size == 0 ? 0 : 1) + (form.order == ValueOrder::kOther ? 0 : 1);
  }
  void Form(const PageForm& form) const {
    if (form.page_size != 0) writer.Uint("page", form.page_size);
    if (form.order == ValueOrder::kOther) return;
    writer.Text("format", form.order == ValueOrder::kNhd ? "NHD" : "HND", KvLayout::kMaxNameBytes);
  }
  static uint32_t NumKeys(const ValueFormat& values) {
    return (values.dtypes.empty() ? 0 : 1) + (values.scales.empty() ? 0 : 1);
  }
  void Values(const ValueFormat& values) const {
    if (!values.dtypes.empty()) {
      writer.Key("dtypes");
      writer.packer.pack_array(static_cast<uint32_t>(values.dtypes.size()));
      for (const DType dtype : values.dtypes) writer.packer.pack(std::string(DTypeName(dtype)));
    }
    if (values.scales.empty()) return;
    // Not as numbers: the packer makes integers of those that are whole.
    writer.Binary("scales", {reinterpret_cast<const char*>(values.scales.data()),
                             values.scales.size() * sizeof(float)});
  }
  void operator()(const HelloMsg& body) const {
    Head("hello", 3 + NumAddresses(body.data) + (body.heads.total == 0 ? 0 : 2) +
                      (body.converts ? 1 : 0) + (body.casts ? 1 : 0));
    writer.Text("name", body.name, kMaxNameBytes);
    writer.Text("model", body.model, kMaxModelBytes);
    PackLayout(writer, body.layout);
    Heads(body.heads.first, body.heads.total);
    if (body.converts) writer.Uint("converts", 1);
    if (body.casts) writer.Uint("casts", 1);
    Addresses(body.data);
  }
  void operator()(const WelcomeMsg& body) const {
    Head("welcome", 1 + NumAddresses(body.data) + (body.silence_ms == 0 ? 0 : 1));
    writer.Text("name", body.name, kMaxNameBytes);
    Addresses(body.data);
    if (body.silence_ms != 0) writer.Uint("silence", body.silence_ms);
  }
  void operator()(const RefuseMsg& body) const {
    Head("refuse", 3);
    writer.Uint("id", body.transfer_id);
    writer.Status(body.status);
  }
  void operator()(const FetchMsg& body) const {
    Head("fetch", 7 + (body.tail_bytes == 0 ? 0 : 1) +
                      (body.in_place_bytes == kBytesInPlace ? 0 : 1) +
                      (body.replaces == 0 ? 0 : 1) + (body.attempt == 0 ? 0 : 1) +
                      (body.from_bytes == 0 ? 0 : 1) + (body.wait_ms == 0 ? 0 : 1) +
                      (body.reads.possible() ? 2 : 0) + (body.heads.count == 0 ? 0 : 2) +
                      NumKeys(body.reader) + NumKeys(body.form) + NumKeys(body.values));
    writer.Uint("id", body.transfer_id);
    writer.Uint("lease", body.lease_id);
    PackRuns(writer, body.positions);
    writer.Uint("ms", body.timeout_ms);
    writer.Uint("window", body.window_bytes);
    writer.Uint("chunk", body.chunk_bytes);
    writer.Bool("sum", body.checksum);
    if (body.tail_bytes != 0) writer.Uint("tail", body.tail_bytes);
    if (body.in_place_bytes != kBytesInPlace) writer.Uint("in_place", body.in_place_bytes);
    if (body.replaces != 0) writer.Uint("replaces", body.replaces);
    if (body.attempt != 0) writer.Uint("attempt", body.attempt);
    if (body.from_bytes != 0) writer.Uint("from", body.from_bytes);
    if (body.wait_ms != 0) writer.Uint("wait", body.wait_ms);
    Heads(body.heads.first, body.heads.count);
    Whose(body.reader);
    Form(body.form);
    Values(body.values);
    if (!body.reads.possible()) return;
    writer.Uint("read_ns", body.reads.read_ns);
    writer.Uint("mib_ns", body.reads.mib_ns);
  }
  void operator()(const DoneMsg& body) const {
    Head("done", 3 + NumKeys(body.reader));
    writer.Uint("id", body.transfer_id);
    writer.Uint("lease", body.lease_id);
    writer.Uint("bytes", body.bytes);
    Whose(body.reader);
  }
  void operator()(const CancelMsg& body) const {
    Head("cancel", 2);
    writer.Uint("id", body.transfer_id);
    writer.Text("msg", body.reason, kMaxTextBytes);
  }
  void operator()(const AbortMsg& body) const {
    Head("abort", body.again ? 4 : 3);
    writer.Uint("id", body.transfer_id);
    writer.Status(body.status);
    if (body.again) writer.Bool("again", true);
  }
  void operator()(const CallMsg& body) const {
    Head("call", 4);
    writer.Uint("id", body.call_id);
    writer.Text("fn", body.function, kMaxFunctionBytes);
    writer.Uint("ms", body.timeout_ms);
    PackFields(writer, "args", body.args);
  }
  void operator()(const ReplyMsg& body) const {
    Head("reply", 4);
    writer.Uint("id", body.call_id);
    writer.Status(body.status);
    PackFields(writer, "args", body.result);
  }
  void operator()(const PingMsg&) const { Head("ping", 0); }
  void operator()(const PongMsg&) const { Head("pong", 0); }
  void operator()(const ByeMsg&) const { Head("bye", 0); }
};

}  // namespace

std::string EncodeMessage(const Message& message) {
  msgpack::sbuffer buffer;
  Packer packer(buffer);
  Writer writer{packer};
  std::visit(BodyWriter{writer, message}, message.body);
  return {buffer.data(), buffer.size()};
}

}  // namespace kvferry
