#include "examples/two_node/options.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>

#include "absl/status/status.h"
#include "examples/two_node/layout_flags.h"

namespace kvferry::examples {
namespace {

constexpr int kUsageError = 2;

struct Flags {
  std::string role;
  std::string listen;
  std::string connect;

  LayoutFlags layout;
  std::string fragmentation = "rand";

  bool checksum = false;
  std::string net_device;
  std::string key_file;
  bool allow_insecure_network = false;
  std::vector<std::string> settings;
};

void AddFlags(CLI::App* app, Flags* flags, Options* options) {
  app->add_option("--role", flags->role, "prefill: holds the KV; decode: fetches it")
      ->required()
      ->check(CLI::IsMember({"prefill", "decode"}));
  app->add_option("--listen", flags->listen,
                  "prefill: HOST:PORT to hand tickets out on; port 0 takes a free one. kvferry "
                  "itself listens on the same host, on a port of its own");
  app->add_option("--connect", flags->connect,
                  "decode: HOST:PORT that the prefill side listens on");

  flags->layout.AddTo(app);

  const std::string requests = "Requests";
  app->add_option("--pool-pages", options->pool_pages, "pages of this side's pool")
      ->group(requests);
  app->add_option("--request-pages", options->request_pages, "prefill: pages of one request")
      ->group(requests);
  app->add_option("--requests", options->requests, "prefill: how many requests to serve")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->group(requests);
  app->add_option("--fragmentation", flags->fragmentation,
                  "how a request's pages lie in this side's pool: seq, runs8 or rand")
      ->check(CLI::IsMember({"seq", "runs8", "rand"}))
      ->group(requests);
  app->add_option(
         "--seed", options->seed,
         "which pages are chosen; prefill: also what is in them. The same seed, the same run")
      ->group(requests);
  app->add_option(
         "--layer-delay-ms", options->layer_delay_ms,
         "prefill: write each layer this long after the last one and mark it ready then, as "
         "an engine does; 0: all layers are there before the request is published")
      ->check(CLI::Range(int64_t{0}, int64_t{60000}))
      ->group(requests);

  app->add_flag("--push", options->push,
                "both sides: decode registers its pages first, and prefill pushes to them; else "
                "prefill publishes first, and decode fetches")
      ->group(requests);

  const std::string transport = "Transport";
  app->add_flag("--checksum", flags->checksum, "verify each chunk before it is written to a page")
      ->group(transport);
  app->add_option("--net-device", flags->net_device, "network interface for the data, e.g. eth0")
      ->group(transport);
  app->add_option("--key-file", flags->key_file,
                  "the deployment's key, 64 hexadecimal digits (openssl rand -hex 32), the same on "
                  "both sides; for addresses off loopback")
      ->group(transport);
  app->add_flag("--allow-insecure-network", flags->allow_insecure_network,
                "use addresses off loopback without a key: nobody else reaches the network")
      ->group(transport);
  app->add_option("--config", flags->settings,
                  "KEY=VALUE for any field of kvferry's Config; may be repeated. An unknown key "
                  "lists them all")
      ->allow_extra_args(false)
      ->group(transport);
  app->add_option("--timeout-ms", options->timeout_ms, "longest wait for any answer")
      ->check(CLI::Range(int64_t{1}, int64_t{600000}))
      ->group(transport);
}

absl::Status Finish(const Flags& flags, Options* options) {
  const bool prefill = flags.role == "prefill";
  options->role = prefill ? Role::kPrefill : Role::kDecode;
  const std::string& address = prefill ? flags.listen : flags.connect;
  const std::string& other = prefill ? flags.connect : flags.listen;
  if (address.empty() || !other.empty()) {
    return absl::InvalidArgumentError(prefill ? "--role prefill goes with --listen, not --connect"
                                              : "--role decode goes with --connect, not --listen");
  }
  const absl::StatusOr<HostPort> host_port = ParseHostPort(address);
  if (!host_port.ok()) return host_port.status();
  options->address = *host_port;
  if (prefill && IsEveryInterface(host_port->host)) {
    return absl::InvalidArgumentError(
        "--listen needs an address that the decode side can connect to: the tickets name it");
  }

  const absl::StatusOr<KvLayout> layout = flags.layout.Make();
  if (!layout.ok()) return layout.status();
  options->layout = *layout;
  options->fragmentation = flags.fragmentation == "seq"     ? Fragmentation::kSeq
                           : flags.fragmentation == "runs8" ? Fragmentation::kRuns8
                                                            : Fragmentation::kRand;
  if (prefill) {
    // Fails now rather than when a decode side is there.
    const absl::StatusOr<PageRuns> pages =
        ChoosePages(options->fragmentation, options->pool_pages, options->request_pages, 0);
    if (!pages.ok()) return pages.status();
  }

  absl::StatusOr<Config> config = ConfigFromSettings(flags.settings);
  if (!config.ok()) return config.status();
  if (prefill) config->listen_host = host_port->host;
  if (flags.checksum) config->checksum = true;
  if (!flags.net_device.empty()) config->net_device = flags.net_device;
  if (!flags.key_file.empty()) config->key_file = flags.key_file;
  if (flags.allow_insecure_network) config->allow_insecure_network = true;
  options->config = *std::move(config);
  return options->config.Validate();
}

}  // namespace

Options ParseOptions(int argc, char** argv) {
  CLI::App app(
      "Moves the KV of a few requests from a prefill process to a decode process, verifies every "
      "byte, "
      "and says how fast it went. Start one of each role, on one host or on two:\n\n"
      "  two_node --role prefill --listen 127.0.0.1:5600\n"
      "  two_node --role decode --connect 127.0.0.1:5600\n\n"
      "Exit code: 0 when all requests arrived intact, 1 when one did not, 2 for a wrong command "
      "line.",
      "two_node");
  app.option_defaults()->always_capture_default();
  Flags flags;
  Options options;
  AddFlags(&app, &flags, &options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error) == 0 ? 0 : kUsageError);
  }
  if (const absl::Status status = Finish(flags, &options); !status.ok()) {
    std::fprintf(stderr, "two_node: %s\n", std::string(status.message()).c_str());
    std::exit(kUsageError);
  }
  return options;
}

}  // namespace kvferry::examples
