#include "transport/ticket.h"

#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/host_list.h"
#include "base/status.h"
#include "pool/page_runs.h"

namespace kvferry {
namespace {

constexpr absl::string_view kPullPrefix = "kvferry1";
constexpr absl::string_view kPushPrefix = "kvferrypush1";
constexpr size_t kMaxTicketBytes = 512;

absl::Status Malformed(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("ticket: ", what));
}

bool ParseCount(absl::string_view text, int64_t* count) {
  return absl::SimpleAtoi(text, count) && *count >= 0 && *count <= PageRuns::kMaxPages;
}

// Both kinds have the same parts: `id` says what the lease_id is.
std::string Join(absl::string_view prefix, const Ticket& parts) {
  return absl::StrCat(prefix, "|", parts.address, "|", absl::Hex(parts.epoch), "|",
                      absl::Hex(parts.lease_id), "|", parts.num_pages, "|", parts.num_tokens);
}

absl::StatusOr<Ticket> Split(absl::string_view text, absl::string_view prefix,
                             absl::string_view id) {
  if (text.size() > kMaxTicketBytes) return Malformed("longer than 512 bytes");
  const std::vector<std::string> parts = absl::StrSplit(text, '|');
  if (parts.size() != 6 || parts[0] != prefix) {
    return Malformed(
        absl::StrCat("not of the form ", prefix, "|address|epoch|", id, "|pages|tokens"));
  }
  Ticket ticket;
  ticket.address = parts[1];
  KVFERRY_RETURN_IF_ERROR(HostOfAddress(ticket.address).status());
  if (!absl::SimpleHexAtoi(parts[2], &ticket.epoch)) {
    return Malformed("the epoch is no hexadecimal number");
  }
  if (!absl::SimpleHexAtoi(parts[3], &ticket.lease_id) || ticket.lease_id == 0) {
    return Malformed(absl::StrCat("the ", id, " is no non-zero hexadecimal number"));
  }
  if (!ParseCount(parts[4], &ticket.num_pages) || !ParseCount(parts[5], &ticket.num_tokens)) {
    return Malformed("pages or tokens are no counts");
  }
  return ticket;
}

}  // namespace

std::string Ticket::ToString() const { return Join(kPullPrefix, *this); }

absl::StatusOr<Ticket> Ticket::Parse(absl::string_view text) {
  return Split(text, kPullPrefix, "lease");
}

std::string ReceiveTicket::ToString() const {
  return Join(kPushPrefix, {address, epoch, receive_id, num_pages, num_tokens});
}

absl::StatusOr<ReceiveTicket> ReceiveTicket::Parse(absl::string_view text) {
  KVFERRY_ASSIGN_OR_RETURN(Ticket parts, Split(text, kPushPrefix, "receive"));
  if (parts.epoch == 0) return Malformed("without an epoch, and only a process can have a receive");
  return ReceiveTicket{std::move(parts.address), parts.epoch, parts.lease_id, parts.num_pages,
                       parts.num_tokens};
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
  if (HostListAdmits(config.allowed_hosts, host)) return absl::OkStatus();
  const bool by_default =
      config.allowed_hosts.empty() && (IsLoopbackHost(host) || host == config.listen_host);
  if (by_default) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat(address, " is at a host that allowed_hosts ('",
                                                  config.allowed_hosts, "') does not admit; add ",
                                                  host, ", its network, or '*' for any"));
}

}  // namespace kvferry
