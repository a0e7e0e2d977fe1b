#include "transport/control/codec.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <msgpack.hpp>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/utf8.h"
#include "pool/casts.h"

namespace kvferry {
namespace {

using Object = msgpack::object;

// Reads keys of one map. After the first failure every further read does nothing, and status()
// keeps it.
class Reader {
 public:
  explicit Reader(const Object& map) {
    if (map.type != msgpack::type::MAP) {
      Fail("not a map");
      return;
    }
    for (uint32_t i = 0; i < map.via.map.size; ++i) {
      const msgpack::object_kv& entry = map.via.map.ptr[i];
      if (entry.key.type != msgpack::type::STR) continue;  // Not a key of ours: ignored.
      keys_.emplace(std::string_view(entry.key.via.str.ptr, entry.key.via.str.size), &entry.val);
    }
  }

  uint64_t Uint(std::string_view key, uint64_t min = 0, uint64_t max = UINT64_MAX) {
    const Object* value = Find(key, msgpack::type::POSITIVE_INTEGER);
    if (value == nullptr) return 0;
    if (value->via.u64 >= min && value->via.u64 <= max) return value->via.u64;
    Fail(absl::StrCat("'", std::string(key), "' is ", value->via.u64, ", not in [", min, ", ", max,
                      "]"));
    return 0;
  }
  int64_t Int(std::string_view key, int64_t min, int64_t max) {
    return static_cast<int64_t>(Uint(key, min, max));
  }
  bool Bool(std::string_view key) {
    const Object* value = Find(key, msgpack::type::BOOLEAN);
    return value != nullptr && value->via.boolean;
  }
  std::string Text(std::string_view key, size_t max_bytes) {
    const Object* value = Find(key, msgpack::type::STR);
    if (value == nullptr) return "";
    return Bytes(key, value->via.str.ptr, value->via.str.size, max_bytes);
  }
  // For people; who wrote it may have cut it, or be no friend.
  std::string Words(std::string_view key) {
    return std::string(Utf8Prefix(ValidUtf8(Text(key, kMaxTextBytes)), kMaxTextBytes));
  }
  std::string Binary(std::string_view key, size_t max_bytes) {
    const Object* value = Find(key, msgpack::type::BIN);
    if (value == nullptr) return "";
    return Bytes(key, value->via.bin.ptr, value->via.bin.size, max_bytes);
  }
  std::span<const Object> Array(std::string_view key, size_t max_elements) {
    const Object* value = Find(key, msgpack::type::ARRAY);
    if (value == nullptr) return {};
    if (value->via.array.size > max_elements) {
      Fail(absl::StrCat("'", std::string(key), "' has ", value->via.array.size, " elements, limit ",
                        max_elements));
      return {};
    }
    return {value->via.array.ptr, value->via.array.size};
  }
  const Object* Map(std::string_view key) { return Find(key, msgpack::type::MAP); }
  bool Has(std::string_view key) const { return keys_.contains(key); }

  void Fail(absl::string_view what) {
    if (status_.ok())
      status_ = absl::InvalidArgumentError(absl::StrCat("malformed message: ", what));
  }
  const absl::Status& status() const { return status_; }
  // What was found under `key`.
  std::string Bytes(std::string_view key, const char* data, size_t size, size_t max_bytes) {
    if (size <= max_bytes) return {data, size};
    Fail(absl::StrCat("'", std::string(key), "' has ", size, " bytes, limit ", max_bytes));
    return "";
  }

 private:
  const Object* Find(std::string_view key, msgpack::type::object_type type) {
    if (!status_.ok()) return nullptr;
    const auto found = keys_.find(key);
    if (found == keys_.end()) {
      Fail(absl::StrCat("no '", std::string(key), "'"));
      return nullptr;
    }
    if (found->second->type == type) return found->second;
    Fail(absl::StrCat("'", std::string(key), "' has the wrong type"));
    return nullptr;
  }

  std::map<std::string_view, const Object*> keys_;
  absl::Status status_;
};

DType DTypeNamed(Reader& reader, absl::string_view name) {
  const absl::StatusOr<DType> dtype = ParseDType(name);
  if (dtype.ok()) return *dtype;
  reader.Fail(dtype.status().message());
  return DType::kUint8;
}

DType ReadDType(Reader& reader) {
  return DTypeNamed(reader, reader.Text("dtype", KvLayout::kMaxNameBytes));
}

KvTensor ReadTensor(Reader& reader) {
  KvTensor tensor;
  tensor.name = reader.Text("name", KvLayout::kMaxNameBytes);
  tensor.num_heads = reader.Int("heads", 1, KvLayout::kMaxHeads);
  tensor.head_dim = reader.Int("dim", 1, KvLayout::kMaxHeadDim);
  if (reader.Has("dtype")) tensor.dtype = ReadDType(reader);
  return tensor;
}

KvLayout ReadLayout(Reader& reader) {
  KvLayout layout;
  const Object* map = reader.Map("layout");
  if (map == nullptr) return layout;
  Reader fields(*map);
  layout.num_layers = fields.Int("layers", 1, KvLayout::kMaxLayers);
  layout.page_size = fields.Int("page_size", 1, KvLayout::kMaxPageSize);
  layout.dtype = ReadDType(fields);
  layout.page_format = fields.Text("format", KvLayout::kMaxNameBytes);
  for (const Object& entry : fields.Array("tensors", KvLayout::kMaxTensors)) {
    Reader tensor(entry);
    layout.tensors.push_back(ReadTensor(tensor));
    if (!tensor.status().ok()) fields.Fail(tensor.status().message());
  }
  if (!fields.status().ok()) {
    reader.Fail(fields.status().message());
    return layout;
  }
  if (const absl::Status valid = layout.Validate(); !valid.ok()) reader.Fail(valid.message());
  return layout;
}

PageRuns ReadRuns(Reader& reader) {
  const std::span<const Object> numbers = reader.Array("runs", 2 * kMaxRuns);
  if (numbers.size() % 2 != 0) reader.Fail("'runs' has an odd number of elements");
  std::vector<PageRun> runs;
  runs.reserve(numbers.size() / 2);
  for (size_t i = 0; i + 1 < numbers.size(); i += 2) {
    for (size_t j = i; j < i + 2; ++j) {
      if (numbers[j].type != msgpack::type::POSITIVE_INTEGER ||
          numbers[j].via.u64 > static_cast<uint64_t>(PageRuns::kMaxPages)) {
        reader.Fail("'runs' holds something that is no page count");
        return {};
      }
    }
    runs.push_back(
        {static_cast<int64_t>(numbers[i].via.u64), static_cast<int64_t>(numbers[i + 1].via.u64)});
  }
  absl::StatusOr<PageRuns> result = PageRuns::FromRuns(runs);
  if (result.ok()) return *std::move(result);
  reader.Fail(result.status().message());
  return {};
}

// 0 (ok) is no refusal, 16 (unauthenticated) is the last canonical code.
absl::Status ReadStatus(Reader& reader, uint64_t min_code = 1) {
  const auto code = static_cast<absl::StatusCode>(reader.Uint("code", min_code, 16));
  return {code, reader.Words("msg")};
}

// Values of other types are for later versions: ignored, like unknown keys.
Fields ReadFields(Reader& reader, std::string_view key) {
  Fields fields;
  const Object* map = reader.Map(key);
  if (map == nullptr) return fields;
  for (uint32_t i = 0; i < map->via.map.size; ++i) {
    const auto& [name, value] = map->via.map.ptr[i];
    if (name.type != msgpack::type::STR) continue;
    const std::string_view text(name.via.str.ptr, name.via.str.size);
    if (value.type == msgpack::type::POSITIVE_INTEGER) {
      fields.Set(text, value.via.u64);
    } else if (value.type == msgpack::type::BIN) {
      fields.Set(text, std::string(value.via.bin.ptr, value.via.bin.size));
    }
  }
  if (const absl::Status valid = fields.Check(); !valid.ok()) reader.Fail(valid.message());
  return fields;
}

constexpr int64_t kMaxWireInt = int64_t{1} << 50;
constexpr int64_t kMaxReadNs = int64_t{1} << 40;

std::string ReadToken(Reader& reader, std::string_view key) {
  std::string token = reader.Binary(key, kTcpTokenBytes);
  if (token.size() != kTcpTokenBytes) {
    reader.Fail(absl::StrCat("'", std::string(key), "' has ", token.size(), " bytes, not ",
                             kTcpTokenBytes));
  }
  return token;
}

// Of another version: as if there was none.
TcpAddress ReadTcp(Reader& reader) {
  TcpAddress tcp;
  const Object* map = reader.Map("tcp");
  if (map == nullptr) return tcp;
  Reader fields(*map);
  const uint64_t version = fields.Uint("v");
  if (fields.status().ok() && version != kTcpVersion) return tcp;
  tcp.lanes = fields.Int("lanes", 1, 1 + kMaxMoreLanes);
  if (fields.Has("port")) {
    tcp.host = fields.Text("host", kMaxHostBytes);
    tcp.port = fields.Int("port", 1, 65535);
    tcp.token = ReadToken(fields, "token");
    tcp.answer = ReadToken(fields, "answer");
  }
  if (!fields.status().ok()) reader.Fail(fields.status().message());
  return tcp;
}

// Of a hello or a welcome: where its data planes are.
DataAddresses ReadAddresses(Reader& reader) {
  DataAddresses data;
  data.worker = reader.Binary("worker", kMaxWorkerAddressBytes);
  if (reader.Has("local")) data.local = reader.Binary("local", kMaxLocalAddressBytes);
  if (reader.Has("direct")) data.direct = reader.Binary("direct", kMaxDirectAddressBytes);
  if (reader.Has("tcp")) data.tcp = ReadTcp(reader);
  if (reader.Has("session")) data.session = reader.Uint("session", 1);
  if (!reader.Has("lanes")) return data;
  for (const Object& address : reader.Array("lanes", kMaxMoreLanes)) {
    if (address.type != msgpack::type::BIN) {
      reader.Fail("'lanes' has the wrong type");
      return data;
    }
    data.lanes.push_back(
        reader.Bytes("lanes", address.via.bin.ptr, address.via.bin.size, kMaxWorkerAddressBytes));
  }
  return data;
}

LeaseReader ReadLeaseReader(Reader& reader) {
  if (!reader.Has("readers")) return {};
  const int64_t readers = reader.Int("readers", 1, LeaseReader::kMax);
  return {reader.Int("reader", 0, std::max<int64_t>(readers, 1) - 1),
          std::max<int64_t>(readers, 1)};
}

PageForm ReadForm(Reader& reader) {
  PageForm form;
  if (reader.Has("page")) form.page_size = reader.Int("page", 1, KvLayout::kMaxPageSize);
  if (!reader.Has("format")) return form;
  const std::string order = reader.Text("format", KvLayout::kMaxNameBytes);
  if (order == "NHD") {
    form.order = ValueOrder::kNhd;
  } else if (order == "HND") {
    form.order = ValueOrder::kHnd;
  } else {
    reader.Fail("'format' is neither NHD nor HND");
  }
  return form;
}

std::vector<DType> ReadDTypes(Reader& reader) {
  std::vector<DType> dtypes;
  for (const Object& entry : reader.Array("dtypes", KvLayout::kMaxTensors)) {
    if (entry.type != msgpack::type::STR) {
      reader.Fail("'dtypes' has the wrong type");
      return {};
    }
    dtypes.push_back(DTypeNamed(reader, {entry.via.str.ptr, entry.via.str.size}));
  }
  return dtypes;
}

std::vector<float> ReadScales(Reader& reader) {
  const std::string bytes =
      reader.Binary("scales", KvLayout::kMaxLayers * KvLayout::kMaxTensors * sizeof(float));
  if (bytes.empty() || bytes.size() % sizeof(float) != 0) {
    reader.Fail("'scales' is no list of float32");
    return {};
  }
  std::vector<float> scales(bytes.size() / sizeof(float));
  std::memcpy(scales.data(), bytes.data(), bytes.size());
  if (!std::all_of(scales.begin(), scales.end(), &IsScale)) {
    reader.Fail("'scales' holds something that is not finite and above 0");
  }
  return scales;
}

ValueFormat ReadValues(Reader& reader) {
  ValueFormat values;
  if (reader.Has("dtypes")) values.dtypes = ReadDTypes(reader);
  if (reader.Has("scales")) values.scales = ReadScales(reader);
  return values;
}

// A HeadShare of a hello, a HeadRange of a fetch.
template <typename Heads>
Heads ReadHeads(Reader& reader) {
  if (!reader.Has("heads")) return {};
  return {reader.Int("head", 0, KvLayout::kMaxHeads), reader.Int("heads", 1, KvLayout::kMaxHeads)};
}

HelloMsg ReadHello(Reader& reader) {
  HelloMsg body;
  body.name = reader.Text("name", kMaxNameBytes);
  body.model = reader.Text("model", kMaxModelBytes);
  body.layout = ReadLayout(reader);
  body.data = ReadAddresses(reader);
  body.heads = ReadHeads<HeadShare>(reader);
  if (reader.Has("converts")) body.converts = reader.Uint("converts", 1) != 0;
  if (reader.Has("casts")) body.casts = reader.Uint("casts", 1) != 0;
  return body;
}

FetchMsg ReadFetch(Reader& reader) {
  FetchMsg body;
  body.transfer_id = reader.Uint("id", 1);
  body.lease_id = reader.Uint("lease", 1);
  body.positions = ReadRuns(reader);
  body.timeout_ms = reader.Int("ms", 1, kMaxWireInt);
  body.window_bytes = reader.Int("window", 1, kMaxWireInt);
  body.chunk_bytes = reader.Int("chunk", 1, kMaxWireInt);
  body.checksum = reader.Bool("sum");
  if (reader.Has("tail")) body.tail_bytes = reader.Int("tail", 1, kMaxWireInt);
  if (reader.Has("in_place")) body.in_place_bytes = reader.Int("in_place", 1, kMaxWireInt);
  if (reader.Has("replaces")) body.replaces = reader.Uint("replaces", 1);
  if (reader.Has("attempt")) body.attempt = reader.Int("attempt", 1, kMaxWireInt);
  if (reader.Has("from")) body.from_bytes = reader.Int("from", 1, kMaxWireInt);
  if (reader.Has("wait")) body.wait_ms = reader.Int("wait", 1, kMaxWireInt);
  body.heads = ReadHeads<HeadRange>(reader);
  body.reader = ReadLeaseReader(reader);
  body.form = ReadForm(reader);
  body.values = ReadValues(reader);
  if (reader.Has("read_ns")) {
    body.reads = {reader.Int("read_ns", 1, kMaxReadNs), reader.Int("mib_ns", 1, kMaxReadNs)};
  }
  return body;
}

MessageBody ReadBody(std::string_view type, Reader& reader) {
  if (type == "hello") return ReadHello(reader);
  if (type == "welcome") {
    WelcomeMsg body;
    body.name = reader.Text("name", kMaxNameBytes);
    body.data = ReadAddresses(reader);
    if (reader.Has("silence")) body.silence_ms = reader.Int("silence", 1, kMaxWireInt);
    return body;
  }
  if (type == "refuse") return RefuseMsg{reader.Uint("id"), ReadStatus(reader)};
  if (type == "fetch") return ReadFetch(reader);
  if (type == "done") {
    return DoneMsg{reader.Uint("id", 1), reader.Uint("lease", 1),
                   reader.Int("bytes", 0, kMaxWireInt), ReadLeaseReader(reader)};
  }
  if (type == "cancel") return CancelMsg{reader.Uint("id", 1), reader.Words("msg")};
  if (type == "abort") {
    return AbortMsg{reader.Uint("id", 1), ReadStatus(reader),
                    reader.Has("again") && reader.Bool("again")};
  }
  if (type == "call") {
    return CallMsg{reader.Uint("id", 1), reader.Text("fn", kMaxFunctionBytes),
                   reader.Int("ms", 1, kMaxWireInt), ReadFields(reader, "args")};
  }
  if (type == "reply") {
    return ReplyMsg{reader.Uint("id", 1), ReadStatus(reader, 0), ReadFields(reader, "args")};
  }
  if (type == "ping") return PingMsg{};
  if (type == "pong") return PongMsg{};
  if (type == "bye") return ByeMsg{};
  reader.Fail(absl::StrCat("unknown type '", std::string(type), "'"));
  return PingMsg{};
}

absl::StatusOr<Message> ReadMessage(const Object& root) {
  Reader reader(root);
  const uint64_t version = reader.Uint("v");
  Message message;
  const std::string type = reader.Text("t", 16);
  message.from_epoch = reader.Uint("e", 1);
  message.to_epoch = reader.Uint("to");
  KVFERRY_RETURN_IF_ERROR(reader.status());
  // A refusal is understood across versions: it may be about the version.
  if (version != kProtocolVersion && type != "refuse") {
    return absl::FailedPreconditionError(
        absl::StrCat("protocol version: ", kProtocolVersion, " here, ", version,
                     " there; run the same kvferry release on both sides"));
  }
  message.body = ReadBody(type, reader);
  KVFERRY_RETURN_IF_ERROR(reader.status());
  return message;
}

}  // namespace

absl::StatusOr<Message> DecodeMessage(std::span<const std::byte> bytes) {
  if (bytes.size() > kMaxMessageBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("malformed message: ", bytes.size(), " bytes, limit ", kMaxMessageBytes));
  }
  // Arrays, maps, strings, binaries, extensions, depth. Without them five bytes can ask for
  // gigabytes.
  const msgpack::unpack_limit limit(2 * kMaxRuns, 64, kMaxTextBytes, Fields::kMaxTotalBytes, 0, 4);
  try {
    size_t end = 0;
    const msgpack::object_handle handle = msgpack::unpack(
        reinterpret_cast<const char*>(bytes.data()), bytes.size(), end,
        [](msgpack::type::object_type, size_t, void*) { return true; }, nullptr, limit);
    if (end != bytes.size()) {
      return absl::InvalidArgumentError("malformed message: bytes after its end");
    }
    return ReadMessage(handle.get());
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("malformed message: ", error.what()));
  }
}

void DeliverMessage(const PeerKey& peer, std::span<const std::byte> bytes, ControlEvents* events) {
  absl::StatusOr<Message> message = DecodeMessage(bytes);
  if (message.ok()) {
    events->OnMessage(peer, *std::move(message));
  } else {
    events->OnMalformed(peer, message.status());
  }
}

}  // namespace kvferry
