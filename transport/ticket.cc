#include "transport/ticket.h"

#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/status.h"
#include "pool/page_runs.h"

namespace kvferry {
namespace {

constexpr absl::string_view kPrefix = "kvferry1";
constexpr size_t kMaxTicketBytes = 512;

absl::Status Malformed(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("ticket: ", what));
}

bool ParseCount(absl::string_view text, int64_t* count) {
  return absl::SimpleAtoi(text, count) && *count >= 0 && *count <= PageRuns::kMaxPages;
}

}  // namespace

std::string Ticket::ToString() const {
  return absl::StrCat(kPrefix, "|", address, "|", absl::Hex(epoch), "|", absl::Hex(lease_id), "|",
                      num_pages, "|", num_tokens);
}

absl::StatusOr<Ticket> Ticket::Parse(absl::string_view text) {
  if (text.size() > kMaxTicketBytes) return Malformed("longer than 512 bytes");
  const std::vector<std::string> parts = absl::StrSplit(text, '|');
  if (parts.size() != 6 || parts[0] != kPrefix) {
    return Malformed("not of the form kvferry1|address|epoch|lease|pages|tokens");
  }
  Ticket ticket;
  ticket.address = parts[1];
  KVFERRY_RETURN_IF_ERROR(HostOfAddress(ticket.address).status());
  if (!absl::SimpleHexAtoi(parts[2], &ticket.epoch) || ticket.epoch == 0) {
    return Malformed("the epoch is no non-zero hexadecimal number");
  }
  if (!absl::SimpleHexAtoi(parts[3], &ticket.lease_id) || ticket.lease_id == 0) {
    return Malformed("the lease is no non-zero hexadecimal number");
  }
  if (!ParseCount(parts[4], &ticket.num_pages) || !ParseCount(parts[5], &ticket.num_tokens)) {
    return Malformed("pages or tokens are no counts");
  }
  return ticket;
}

absl::StatusOr<std::string> HostOfAddress(absl::string_view address) {
  absl::string_view rest = address;
  const size_t colon = address.rfind(':');
  int port = 0;
  if (!absl::ConsumePrefix(&rest, "tcp://") || colon == absl::string_view::npos || colon < 7 ||
      !absl::SimpleAtoi(address.substr(colon + 1), &port) || port < 1 || port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("address '", address.substr(0, 128), "' is not of the form tcp://host:port"));
  }
  absl::string_view host = address.substr(6, colon - 6);
  if (absl::ConsumePrefix(&host, "[")) absl::ConsumeSuffix(&host, "]");
  // ZeroMQ reads ';' as "source address; target": the host checked must be the host dialled.
  if (host.empty() || host.find_first_of(";/@ \t\r\n") != absl::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("address '", address.substr(0, 128), "' names no plain host"));
  }
  return std::string(host);
}

absl::Status CheckHostAllowed(absl::string_view address, const Config& config) {
  KVFERRY_ASSIGN_OR_RETURN(const std::string host, HostOfAddress(address));
  for (const absl::string_view allowed :
       absl::StrSplit(config.allowed_hosts, ',', absl::SkipWhitespace())) {
    const absl::string_view name = absl::StripAsciiWhitespace(allowed);
    if (name == "*" || name == host) return absl::OkStatus();
  }
  const bool by_default =
      config.allowed_hosts.empty() && (IsLoopbackHost(host) || host == config.listen_host);
  if (by_default) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat("the ticket names host ", host,
                                                  ", which allowed_hosts ('", config.allowed_hosts,
                                                  "') does not admit; add it, or '*' for any"));
}

}  // namespace kvferry
