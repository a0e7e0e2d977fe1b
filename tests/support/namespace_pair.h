#pragma once

// Two hosts, as far as the kernel is concerned: two network namespaces joined by a veth pair. Needs
// root.

#include <unistd.h>

#include <cstdlib>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tests/support/wait_for.h"

namespace kvferry {

inline bool Shell(const std::string& command) {
  // NOLINTNEXTLINE(bugprone-command-processor): nothing but what stands in tests.
  return std::system((command + " 2>/dev/null").c_str()) == 0;
}

class NamespacePair {
 public:
  struct Host {
    std::string ns;
    std::string device;
    std::string address;
  };

  NamespacePair() = default;
  ~NamespacePair() {
    // Deleting a namespace deletes its end of the pair, and so the pair.
    if (!made_) return;
    Shell("ip netns del " + prefill.ns);
    Shell("ip netns del " + decode.ns);
  }
  NamespacePair(const NamespacePair&) = delete;
  NamespacePair& operator=(const NamespacePair&) = delete;

  // FAILED_PRECONDITION: why this machine has none.
  absl::Status Make() {
    if (geteuid() != 0) return absl::FailedPreconditionError("network namespaces need root");
    if (!Shell("ip -V >/dev/null")) {
      return absl::FailedPreconditionError("the 'ip' command (iproute2) is not installed");
    }
    if (!Shell("ip netns add " + prefill.ns)) {
      return absl::FailedPreconditionError(
          "this machine lets nobody add a network namespace (ip netns add fails)");
    }
    made_ = true;
    if (!Shell("ip netns add " + decode.ns)) {
      return absl::InternalError("ip netns add failed the second time");
    }
    return Join(prefill, decode);
  }
  // Another pair of devices between the two.
  static absl::Status Join(const Host& one, const Host& other) {
    if (!Shell(absl::StrCat("ip link add ", one.device, " netns ", one.ns, " type veth peer name ",
                            other.device, " netns ", other.ns))) {
      return absl::FailedPreconditionError(
          "this machine lets nobody add a veth pair (ip link add type veth fails)");
    }
    // The kernel takes up to a second to believe in the carrier, and UCX takes no interface without
    // one.
    if (!Up(one) || !Up(other) ||
        !WaitFor([&] { return Running(one) && Running(other); }, Soon())) {
      return absl::InternalError("the veth pair does not come up");
    }
    return absl::OkStatus();
  }
  bool SetLink(const std::string& state) const {
    return Shell(absl::StrCat("ip -n ", prefill.ns, " link set ", prefill.device, " ", state));
  }
  // Of kvferry::Config, for an endpoint on the prefill side's host or the other.
  std::string ConfigOf(bool on_prefill) const {
    const Host& host = on_prefill ? prefill : decode;
    return absl::StrCat(R"("listen_host": ")", host.address,
                        R"(", "allow_insecure_network": true, "net_device": ")", host.device,
                        R"(", "allowed_hosts": ")", prefill.address, ",", decode.address, R"(")");
  }

  const Host prefill = {absl::StrCat("kvf", getpid(), "p"), absl::StrCat("kvf", getpid(), "p"),
                        "10.211.97.1"};
  const Host decode = {absl::StrCat("kvf", getpid(), "d"), absl::StrCat("kvf", getpid(), "d"),
                       "10.211.97.2"};

 private:
  static bool Up(const Host& host) {
    return Shell(absl::StrCat("ip -n ", host.ns, " addr add ", host.address, "/24 dev ",
                              host.device)) &&
           Shell(absl::StrCat("ip -n ", host.ns, " link set lo up")) &&
           Shell(absl::StrCat("ip -n ", host.ns, " link set ", host.device, " up"));
  }
  static bool Running(const Host& host) {
    return Shell(absl::StrCat("ip -n ", host.ns, " -o link show dev ", host.device,
                              " | grep -q 'state UP'"));
  }

  bool made_ = false;
};

}  // namespace kvferry
