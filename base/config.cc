#include "base/config.h"

#include <netdb.h>
#include <netinet/in.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <variant>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "base/check_range.h"
#include "base/host_list.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/status.h"

namespace kvferry {
namespace {

using Member = std::variant<std::string Config::*, int64_t Config::*, bool Config::*>;

struct Field {
  const char* name;
  Member member;
  int64_t min = 0;  // Integers only.
  int64_t max = 0;
};

constexpr int64_t kHourMs = 3600 * 1000;
// CUDA may share what lies beside smaller allocations together with them.
constexpr int64_t kMinDeviceArenaBytes = 2 << 20;

// The one table that JSON, the environment and validation read.
constexpr std::array kFields = {
    Field{"listen_host", &Config::listen_host},
    Field{"listen_port", &Config::listen_port, 0, 65535},
    Field{"allowed_hosts", &Config::allowed_hosts},
    Field{"key_file", &Config::key_file},
    Field{"allow_insecure_network", &Config::allow_insecure_network},
    Field{"data_port", &Config::data_port, 0, 65535},
    Field{"net_device", &Config::net_device},
    Field{"tcp_congestion_control", &Config::tcp_congestion_control},
    Field{"ucx_tls", &Config::ucx_tls},
    Field{"network_path", &Config::network_path},
    Field{"direct_tls", &Config::direct_tls},
    Field{"lanes", &Config::lanes, 1, 8},
    Field{"same_host_path", &Config::same_host_path},
    Field{"copy_threads", &Config::copy_threads, 1, 64},
    Field{"chunk_bytes", &Config::chunk_bytes, 4 << 10, Config::kMaxChunkBytes},
    Field{"arena_bytes", &Config::arena_bytes, 64 << 10, int64_t{64} << 30},
    Field{"device_arena_bytes", &Config::device_arena_bytes, 0, 512 << 20},
    Field{"credits_per_transfer", &Config::credits_per_transfer, 1, 4096},
    Field{"checksum", &Config::checksum},
    Field{"heartbeat_interval_ms", &Config::heartbeat_interval_ms, 10, kHourMs},
    Field{"heartbeat_timeout_ms", &Config::heartbeat_timeout_ms, 20, kHourMs},
    Field{"connect_timeout_ms", &Config::connect_timeout_ms, 1, kHourMs},
    Field{"lease_ms", &Config::lease_ms, 1, 24 * kHourMs},
    Field{"publish_grace_ms", &Config::publish_grace_ms, 0, kHourMs},
    Field{"fetch_timeout_ms", &Config::fetch_timeout_ms, 1, 24 * kHourMs},
    Field{"max_fetch_timeout_ms", &Config::max_fetch_timeout_ms, 1, 24 * kHourMs},
    Field{"busy_poll_us", &Config::busy_poll_us, 0, 10000},
    Field{"max_peers", &Config::max_peers, 1, 65536},
    Field{"max_fetches_per_peer", &Config::max_fetches_per_peer, 1, 65536},
    Field{"max_calls_per_peer", &Config::max_calls_per_peer, 1, 1 << 20},
    Field{"max_leases", &Config::max_leases, 1, 1 << 24},
};

constexpr absl::string_view kVariablePrefix = "KVFERRY_", kLogVariable = "KVFERRY_LOG";
// Of ./dev and tests.
constexpr std::array<absl::string_view, 3> kOtherPrefixes = {"KVFERRY_TEST_", "KVFERRY_RANDOM_",
                                                             "KVFERRY_DEV_"};
constexpr std::array<absl::string_view, 4> kSameHostPaths = {"auto", "in_place", "arena",
                                                             "network"};
constexpr std::array<absl::string_view, 3> kNetworkPaths = {"packed", "direct", "auto"};

const Field* FindField(absl::string_view name) {
  for (const Field& field : kFields) {
    if (name == field.name) return &field;
  }
  return nullptr;
}

absl::Status WrongType(const Field& field, absl::string_view got) {
  const char* want = std::holds_alternative<int64_t Config::*>(field.member) ? "an integer"
                     : std::holds_alternative<bool Config::*>(field.member)  ? "true or false"
                                                                             : "a string";
  return absl::InvalidArgumentError(
      absl::StrCat("config: ", field.name, " is ", got, " but must be ", want));
}

// dump() goes as deep as the value does, so deep nesting could exhaust the stack.
std::string Shown(const nlohmann::json& value) {
  return value.is_structured() ? absl::StrCat("an ", value.type_name()) : value.dump();
}

absl::Status UnknownKey(absl::string_view key) {
  return absl::InvalidArgumentError(absl::StrCat("config: unknown key '", key, "'; the keys are ",
                                                 absl::StrJoin(Config::FieldNames(), ", ")));
}

absl::Status SetFromJson(const Field& field, const nlohmann::json& value, Config* config) {
  if (const auto* text = std::get_if<std::string Config::*>(&field.member)) {
    if (!value.is_string()) return WrongType(field, Shown(value));
    config->*(*text) = value.get<std::string>();
  } else if (const auto* number = std::get_if<int64_t Config::*>(&field.member)) {
    if (!value.is_number_integer()) return WrongType(field, Shown(value));
    // A value above INT64_MAX would wrap round to a negative one and pass for small.
    if (value.is_number_unsigned() && value.get<uint64_t>() > INT64_MAX) {
      return WrongType(field, Shown(value));
    }
    config->*(*number) = value.get<int64_t>();
  } else {
    if (!value.is_boolean()) return WrongType(field, Shown(value));
    config->*std::get<bool Config::*>(field.member) = value.get<bool>();
  }
  return absl::OkStatus();
}

absl::Status SetFromText(const Field& field, const std::string& text, Config* config) {
  if (const auto* string = std::get_if<std::string Config::*>(&field.member)) {
    config->*(*string) = text;
  } else if (const auto* number = std::get_if<int64_t Config::*>(&field.member)) {
    int64_t value = 0;  // Which is set when it fails, too.
    if (!absl::SimpleAtoi(text, &value)) return WrongType(field, text);
    config->*(*number) = value;
  } else {
    bool value = false;
    if (!absl::SimpleAtob(text, &value)) return WrongType(field, text);
    config->*std::get<bool Config::*>(field.member) = value;
  }
  return absl::OkStatus();
}

std::string VariableOf(const Field& field) {
  return absl::StrCat(kVariablePrefix, absl::AsciiStrToUpper(field.name));
}

bool IsKnown(absl::string_view variable) {
  return variable == kLogVariable ||
         absl::c_any_of(
             kOtherPrefixes,
             [&](absl::string_view prefix) { return absl::StartsWith(variable, prefix); }) ||
         absl::c_any_of(kFields, [&](const Field& field) { return variable == VariableOf(field); });
}

// A misspelt one may be what was to protect something. No error: a cluster's manager may put names
// of its own there, after its services'. Each list is said once.
void WarnOfUnknownVariables() {
  std::set<std::string> unknown;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const absl::string_view text = *variable;
    const absl::string_view name = text.substr(0, text.find('='));
    if (absl::StartsWith(name, kVariablePrefix) && !IsKnown(name)) unknown.emplace(name);
  }
  static Mutex mutex;
  static std::set<std::string>& said = *new std::set<std::string>;
  const MutexLock lock(&mutex);
  if (unknown.empty() || std::exchange(said, unknown) == unknown) return;
  Log().warn("no options of kvferry's, and ignored: {}; the options are KVFERRY_ and {}",
             absl::StrJoin(unknown, ", "),
             absl::AsciiStrToUpper(absl::StrJoin(Config::FieldNames(), ", ")));
}

absl::Status CheckNumber(const Field& field, const Config& config) {
  const auto* number = std::get_if<int64_t Config::*>(&field.member);
  if (number == nullptr) return absl::OkStatus();
  return CheckRange("config", field.name, config.*(*number), field.min, field.max);
}

absl::Status CheckChoice(absl::string_view name, const std::string& value,
                         absl::Span<const absl::string_view> choices) {
  if (absl::c_linear_search(choices, value)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "config: ", name, " is '", value, "' but must be one of ", absl::StrJoin(choices, ", ")));
}

// UCX opens a port for each transport that is named, and tcp's takes remote memory access from
// anybody, in software, at addresses that it does not check.
absl::Status CheckDirectTls(const std::string& direct_tls) {
  for (absl::string_view tls : absl::StrSplit(direct_tls, ',')) {
    absl::ConsumePrefix(&tls, "\\");  // To UCX: this very transport, no group of them.
    if (!tls.empty() && tls[0] != '^' && tls != "all" && !absl::StartsWith(tls, "tcp")) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("config: direct_tls is '", direct_tls,
                     "' but must name transports with remote memory access, such as rc, and "
                     "neither tcp nor all of them"));
  }
  return absl::OkStatus();
}

bool IsAny(const sockaddr& address) {
  if (address.sa_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr == INADDR_ANY;
  }
  if (address.sa_family != AF_INET6) return false;
  const in6_addr& six = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  // The last: of IPv4, written as one of IPv6.
  return IN6_IS_ADDR_UNSPECIFIED(&six) || (IN6_IS_ADDR_V4MAPPED(&six) && six.s6_addr32[3] == 0);
}

absl::Status CheckListenHost(const std::string& host) {
  if (host.empty()) {
    return absl::InvalidArgumentError(
        "config: listen_host is empty but must be an address or an interface of this machine, such "
        "as 127.0.0.1");
  }
  // IPv6 has two colons at least.
  if (std::count(host.begin(), host.end(), ':') != 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("config: listen_host is '", host,
                   "' but must be an address or an interface alone, such as 127.0.0.1; the port "
                   "goes into listen_port"));
}

// Who can reach an endpoint off loopback has to have the key, or the network has to be closed. UCX
// takes connections at net_device, wherever an endpoint listens and whether it does.
absl::Status CheckReach(const Config& config) {
  if (config.allow_insecure_network) return absl::OkStatus();
  constexpr absl::string_view kOrClose =
      "put the nodes on a network that only they reach and set allow_insecure_network=true";
  if (!config.ucx_tls.empty() && !config.net_device.empty() && config.net_device != "lo") {
    return absl::InvalidArgumentError(absl::StrCat(
        "config: net_device is '", config.net_device,
        "', which is not loopback, and UCX (ucx_tls) takes connections there from anybody: ",
        kOrClose));
  }
  if (IsLoopbackHost(config.listen_host)) return absl::OkStatus();
  const std::string begin = absl::StrCat("config: listen_host is '", config.listen_host,
                                         "', which is not loopback, and ");
  if (config.key_file.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        begin, "peers would not be authenticated: give all sides the same key_file, or ",
        kOrClose));
  }
  if (!config.ucx_tls.empty() || config.network_path != "packed") {
    return absl::InvalidArgumentError(absl::StrCat(
        begin, "UCX (ucx_tls, network_path) asks nobody for the key of key_file: ", kOrClose));
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<std::string> Config::FieldNames() {
  std::vector<std::string> names;
  names.reserve(std::size(kFields));
  for (const Field& field : kFields) names.emplace_back(field.name);
  return names;
}

absl::StatusOr<Config> Config::FromJson(absl::string_view json, const Config& base) {
  const nlohmann::json object = nlohmann::json::parse(json.begin(), json.end(), nullptr,
                                                      /*allow_exceptions=*/false);
  if (!object.is_object()) {
    return absl::InvalidArgumentError("config: not a JSON object");
  }
  Config config = base;
  for (const auto& [key, value] : object.items()) {
    const Field* field = FindField(key);
    if (field == nullptr) return UnknownKey(key);
    KVFERRY_RETURN_IF_ERROR(SetFromJson(*field, value, &config));
  }
  return config;
}

absl::Status Config::Set(absl::string_view key, const std::string& text) {
  const Field* field = FindField(key);
  return field == nullptr ? UnknownKey(key) : SetFromText(*field, text, this);
}

absl::StatusOr<Config> Config::FromEnv(const Config& base) {
  Config config = base;
  for (const Field& field : kFields) {
    const std::string name = VariableOf(field);
    const char* text = std::getenv(name.c_str());
    if (text == nullptr) continue;
    if (const absl::Status set = SetFromText(field, text, &config); !set.ok()) {
      return absl::Status(set.code(), absl::StrCat("environment, ", name, ": ", set.message()));
    }
  }
  WarnOfUnknownVariables();
  return config;
}

absl::Status Config::Validate() const {
  for (const Field& field : kFields) KVFERRY_RETURN_IF_ERROR(CheckNumber(field, *this));
  KVFERRY_RETURN_IF_ERROR(CheckListenHost(listen_host));
  if (heartbeat_timeout_ms < 2 * heartbeat_interval_ms) {
    return absl::InvalidArgumentError(
        absl::StrCat("config: heartbeat_timeout_ms is ", heartbeat_timeout_ms,
                     " but must be at least twice heartbeat_interval_ms (", heartbeat_interval_ms,
                     "), or one late beat looks like a death"));
  }
  if (arena_bytes < chunk_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("config: arena_bytes is ", arena_bytes,
                                                   " but must hold at least one chunk_bytes (",
                                                   chunk_bytes, ")"));
  }
  if (device_arena_bytes != 0 && device_arena_bytes < kMinDeviceArenaBytes) {
    return absl::InvalidArgumentError(absl::StrCat("config: device_arena_bytes is ",
                                                   device_arena_bytes, " but must be at least ",
                                                   kMinDeviceArenaBytes, ", or 0 for none"));
  }
  KVFERRY_RETURN_IF_ERROR(CheckChoice("same_host_path", same_host_path, kSameHostPaths));
  KVFERRY_RETURN_IF_ERROR(CheckChoice("network_path", network_path, kNetworkPaths));
  KVFERRY_RETURN_IF_ERROR(CheckDirectTls(direct_tls));
  if (const absl::Status hosts = CheckHostList(allowed_hosts); !hosts.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("config: allowed_hosts: ", hosts.message()));
  }
  KVFERRY_RETURN_IF_ERROR(CheckReach(*this));
  if (IsEveryInterface(listen_host)) {
    return absl::InvalidArgumentError(
        absl::StrCat("config: listen_host is ", listen_host,
                     ", which goes into tickets and leads nobody here: set it to the address by "
                     "which peers reach this host"));
  }
  if (fetch_timeout_ms > max_fetch_timeout_ms) {
    return absl::InvalidArgumentError(absl::StrCat("config: fetch_timeout_ms is ", fetch_timeout_ms,
                                                   " but must be at most max_fetch_timeout_ms (",
                                                   max_fetch_timeout_ms,
                                                   "); raise that too, on both sides"));
  }
  return absl::OkStatus();
}

// As who listens there reads it: 0, 0x0 and ::0 are such addresses, too, and zones are left out.
bool IsEveryInterface(absl::string_view host) {
  if (host == "*") return true;
  if (absl::ConsumePrefix(&host, "[")) absl::ConsumeSuffix(&host, "]");
  host = host.substr(0, host.find('%'));
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST;
  addrinfo* read = nullptr;
  if (getaddrinfo(std::string(host).c_str(), nullptr, &hints, &read) != 0) return false;
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> found(read, freeaddrinfo);
  return IsAny(*found->ai_addr);
}

bool IsLoopbackHost(absl::string_view host) {
  return HostListAdmits("127.0.0.0/8,::1,localhost", host);
}

}  // namespace kvferry
