#include "base/host_list.h"

#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace kvferry {
namespace {

struct Address {
  std::array<uint8_t, 16> bytes{};
  int bits = 0;  // 32 or 128.
};

struct Network {
  Address address;
  int prefix_bits = 0;
};

std::optional<Address> ParseAddress(absl::string_view text) {
  if (absl::ConsumePrefix(&text, "[") && !absl::ConsumeSuffix(&text, "]")) return std::nullopt;
  if (text.find('\0') != absl::string_view::npos) return std::nullopt;  // inet_pton stops there.
  const std::string host(text);
  Address address;
  if (inet_pton(AF_INET, host.c_str(), address.bytes.data()) == 1) {
    address.bits = 32;
  } else if (inet_pton(AF_INET6, host.c_str(), address.bytes.data()) == 1) {
    address.bits = 128;
  } else {
    return std::nullopt;
  }
  return address;
}

std::optional<Network> ParseNetwork(absl::string_view text) {
  const size_t slash = text.find('/');
  const std::optional<Address> address = ParseAddress(text.substr(0, slash));
  if (!address) return std::nullopt;
  Network network{*address, address->bits};
  if (slash == absl::string_view::npos) return network;
  if (!absl::SimpleAtoi(text.substr(slash + 1), &network.prefix_bits)) return std::nullopt;
  if (network.prefix_bits < 0 || network.prefix_bits > address->bits) return std::nullopt;
  return network;
}

bool Contains(const Network& network, const Address& address) {
  if (network.address.bits != address.bits) return false;
  for (int bit = 0; bit < network.prefix_bits; bit += 8) {
    const int rest = std::min(8, network.prefix_bits - bit);
    const int differ = network.address.bytes[bit / 8] ^ address.bytes[bit / 8];
    if (differ >> (8 - rest) != 0) return false;
  }
  return true;
}

// Of an address; what else follows a zone stays.
absl::string_view WithoutZone(absl::string_view entry) {
  const size_t zone = entry.find('%');
  if (zone == absl::string_view::npos ||
      entry.substr(0, zone).find(':') == absl::string_view::npos ||
      entry.substr(zone).find_first_of("/:*]") != absl::string_view::npos) {
    return entry;
  }
  return entry.substr(0, zone);
}

auto Entries(absl::string_view list) { return absl::StrSplit(list, ',', absl::SkipWhitespace()); }

bool EntryAdmits(absl::string_view entry, absl::string_view host) {
  if (entry == "*" || entry == host) return true;
  const std::optional<Address> address = ParseAddress(host);
  const std::optional<Network> network = ParseNetwork(entry);
  return address && network && Contains(*network, *address);
}

}  // namespace

absl::Status CheckHostList(absl::string_view list) {
  for (const absl::string_view padded : Entries(list)) {
    const absl::string_view entry = absl::StripAsciiWhitespace(padded);
    if (entry == "*" || entry.find_first_of("*/:; \t\n") == absl::string_view::npos) continue;
    // An address of IPv6 may have a zone.
    if (ParseNetwork(WithoutZone(entry))) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("'", entry,
                     "' is no numeric address, no network such as 10.0.0.0/8, no name, and not *; "
                     "ports don't belong here, and commas stand between hosts"));
  }
  return absl::OkStatus();
}

bool HostListAdmits(absl::string_view list, absl::string_view host) {
  for (const absl::string_view entry : Entries(list)) {
    if (EntryAdmits(absl::StripAsciiWhitespace(entry), host)) return true;
  }
  return false;
}

}  // namespace kvferry
