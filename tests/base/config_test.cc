#include "base/config.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "tests/support/captured_log.h"
#include "tests/support/status.h"

namespace kvferry {
namespace {

absl::StatusOr<Config> Json(const std::string& json) { return Config::FromJson(json, Config()); }

class Variable {
 public:
  Variable(const std::string& name, const std::string& value) : name_(name) {
    setenv(name.c_str(), value.c_str(), 1);
  }
  ~Variable() { unsetenv(name_.c_str()); }

 private:
  const std::string name_;
};

TEST(ConfigDefaults, AreValid) { EXPECT_TRUE(IsOk(Config().Validate())); }

TEST(ConfigJson, SetsWhatItNamesAndNothingElse) {
  const Config config =
      Must(Json(R"({"listen_port": 4000, "checksum": true, "net_device": "eth1", "lease_ms": 5, )"
                R"("listen_host": "::1"})"));
  EXPECT_EQ(config.listen_port, 4000);
  EXPECT_TRUE(config.checksum);
  EXPECT_EQ(config.net_device, "eth1");
  EXPECT_EQ(config.lease_ms, 5);
  EXPECT_EQ(config.listen_host, "::1");
  EXPECT_EQ(config.chunk_bytes, Config().chunk_bytes);
  Config base;
  base.max_peers = 3;
  EXPECT_EQ(Must(Config::FromJson("{}", base)).max_peers, 3);
}

TEST(ConfigJson, UnknownKeyListsTheKeys) {
  const absl::Status status = Json(R"({"lease_msec": 5})").status();
  EXPECT_TRUE(Fails(status, absl::StatusCode::kInvalidArgument, "'lease_msec'"));
  ASSERT_GT(Config::FieldNames().size(), 15u);
  for (const std::string& name : Config::FieldNames()) {
    EXPECT_NE(status.message().find(name), std::string::npos) << name;
  }
}

TEST(ConfigJson, WrongTypesNameTheKey) {
  const auto wrong = [](const std::string& json, absl::string_view key, absl::string_view want) {
    EXPECT_TRUE(Fails(Json(json), absl::StatusCode::kInvalidArgument, key, want)) << json;
  };
  wrong(R"({"lease_ms": "5"})", "lease_ms", "an integer");
  wrong(R"({"lease_ms": 5.0})", "lease_ms", "an integer");
  wrong(R"({"lease_ms": true})", "lease_ms", "an integer");
  wrong(R"({"lease_ms": null})", "lease_ms", "an integer");
  wrong(R"({"lease_ms": 9223372036854775808})", "lease_ms", "an integer");
  wrong(R"({"lease_ms": 18446744073709551615})", "lease_ms", "an integer");
  wrong(R"({"lease_ms": 1e99})", "lease_ms", "an integer");
  wrong(R"({"checksum": 1})", "checksum", "true or false");
  wrong(R"({"checksum": "true"})", "checksum", "true or false");
  wrong(R"({"net_device": 5})", "net_device", "a string");
  wrong(R"({"net_device": ["eth0"]})", "net_device", "a string");
}

TEST(ConfigJson, DeepNestingIsOneMoreWrongType) {
  const std::string deep = std::string(1 << 20, '[') + std::string(1 << 20, ']');
  EXPECT_TRUE(Fails(Json("{\"lease_ms\": " + deep + "}"), absl::StatusCode::kInvalidArgument,
                    "lease_ms is an array"));
}

TEST(ConfigJson, ExtremeIntegersAreKeptForValidation) {
  EXPECT_EQ(Must(Json(R"({"lease_ms": 9223372036854775807})")).lease_ms, INT64_MAX);
  EXPECT_EQ(Must(Json(R"({"lease_ms": -9223372036854775808})")).lease_ms, INT64_MIN);
}

TEST(ConfigJson, NotAnObject) {
  for (const char* json : {"", "{", "[]", "5", "null", "{\"a\":}", "\xff\xfe"}) {
    EXPECT_TRUE(Fails(Json(json), absl::StatusCode::kInvalidArgument, "not a JSON object")) << json;
  }
}

TEST(ConfigEnvironment, SetsEveryField) {
  const Variable port("KVFERRY_LISTEN_PORT", "4001");
  const Variable checksum("KVFERRY_CHECKSUM", "true");
  const Variable device("KVFERRY_NET_DEVICE", "eth2");
  const Config config = Must(Config::FromEnv(Config()));
  EXPECT_EQ(config.listen_port, 4001);
  EXPECT_TRUE(config.checksum);
  EXPECT_EQ(config.net_device, "eth2");
  EXPECT_EQ(config.lease_ms, Config().lease_ms);
}

TEST(ConfigEnvironment, WrongValuesNameTheField) {
  for (const std::string value : {"", "x", "5x", "1.5", "9223372036854775808"}) {
    const Variable variable("KVFERRY_LEASE_MS", value);
    EXPECT_TRUE(Fails(Config::FromEnv(Config()), absl::StatusCode::kInvalidArgument, "lease_ms"))
        << value;
  }
  const Variable variable("KVFERRY_CHECKSUM", "maybe");
  EXPECT_TRUE(Fails(Config::FromEnv(Config()), absl::StatusCode::kInvalidArgument, "checksum"));
}

TEST(ConfigEnvironment, WrongValuesNameTheVariable) {
  const Variable variable("KVFERRY_DATA_PORT",
                          "tcp://10.96.0.7:7700");  // From a Service "kvferry-data".
  EXPECT_TRUE(Fails(Config::FromEnv(Config()), absl::StatusCode::kInvalidArgument,
                    "KVFERRY_DATA_PORT", "tcp://10.96.0.7:7700"));
}

TEST(ConfigEnvironment, UnknownVariablesAreSaidOnce) {
  const CapturedLog log;
  const Variable known("KVFERRY_KEY_FILE", "key"), level("KVFERRY_LOG", "warn"),
      of_tests("KVFERRY_TEST_ANYTHING", "1"), unknown("KVFERRY_KEYFILE", "key");
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(IsOk(Config::FromEnv(Config())));
  EXPECT_TRUE(log.Has({"ignored: KVFERRY_KEYFILE;", "KEY_FILE"})) << log.ToString();
  EXPECT_EQ(log.lines().size(), 1);
  const Variable another("KVFERRY_LAINS", "2");
  EXPECT_TRUE(IsOk(Config::FromEnv(Config())));
  EXPECT_TRUE(log.Has({"ignored: KVFERRY_KEYFILE, KVFERRY_LAINS;"})) << log.ToString();
}

TEST(ConfigEnvironment, EveryFieldIsReachable) {
  for (const std::string& name : Config::FieldNames()) {
    // A value that only a text field accepts: the others must name themselves.
    const Variable variable(absl::StrCat("KVFERRY_", absl::AsciiStrToUpper(name)), "no value");
    const absl::StatusOr<Config> config = Config::FromEnv(Config());
    if (!config.ok()) {
      EXPECT_TRUE(Fails(config, absl::StatusCode::kInvalidArgument, name));
    } else {
      EXPECT_TRUE(config->listen_host == "no value" || config->allowed_hosts == "no value" ||
                  config->net_device == "no value" || config->ucx_tls == "no value" ||
                  config->tcp_congestion_control == "no value" ||
                  config->same_host_path == "no value" || config->network_path == "no value" ||
                  config->direct_tls == "no value" || config->key_file == "no value")
          << name;
    }
  }
}

struct Range {
  const char* name;
  int64_t Config::*field;
  int64_t min;
  int64_t max;
};

TEST(ConfigValidate, Ranges) {
  // The relations between fields are out of the way: each is tried alone.
  const Range ranges[] = {
      {"listen_port", &Config::listen_port, 0, 65535},
      {"copy_threads", &Config::copy_threads, 1, 64},
      {"chunk_bytes", &Config::chunk_bytes, 4 << 10, 4 << 20},
      {"credits_per_transfer", &Config::credits_per_transfer, 1, 4096},
      {"connect_timeout_ms", &Config::connect_timeout_ms, 1, 3600000},
      {"lease_ms", &Config::lease_ms, 1, 24 * 3600000},
      {"publish_grace_ms", &Config::publish_grace_ms, 0, 3600000},
      {"max_peers", &Config::max_peers, 1, 65536},
      {"max_fetches_per_peer", &Config::max_fetches_per_peer, 1, 65536},
      {"max_leases", &Config::max_leases, 1, 1 << 24},
      {"busy_poll_us", &Config::busy_poll_us, 0, 10000},
  };
  for (const Range& range : ranges) {
    Config config;
    for (const int64_t good : {range.min, range.max}) {
      config.*range.field = good;
      EXPECT_TRUE(IsOk(config.Validate())) << range.name;
    }
    for (const int64_t bad : {range.min - 1, range.max + 1, INT64_MIN, INT64_MAX}) {
      config.*range.field = bad;
      EXPECT_TRUE(Fails(config.Validate(), absl::StatusCode::kInvalidArgument, range.name,
                        absl::StrCat(bad), absl::StrCat(range.max)))
          << bad;
    }
  }
}

TEST(ConfigValidate, Relations) {
  Config config;
  config.heartbeat_interval_ms = 1000;
  config.heartbeat_timeout_ms = 1999;
  EXPECT_TRUE(Fails(config.Validate(), absl::StatusCode::kInvalidArgument, "heartbeat_timeout_ms",
                    "at least twice"));
  config.heartbeat_timeout_ms = 2000;
  EXPECT_TRUE(IsOk(config.Validate()));
  config.chunk_bytes = 128 << 10;
  config.arena_bytes = 64 << 10;
  EXPECT_TRUE(
      Fails(config.Validate(), absl::StatusCode::kInvalidArgument, "arena_bytes", "chunk_bytes"));
  config.arena_bytes = 128 << 10;
  EXPECT_TRUE(IsOk(config.Validate()));
  config.device_arena_bytes = 1000;
  EXPECT_TRUE(Fails(config.Validate(), absl::StatusCode::kInvalidArgument,
                    "device_arena_bytes is 1000 but must be at least 2097152, or 0 for none"));
  config.device_arena_bytes = 0;
  EXPECT_TRUE(IsOk(config.Validate()));
}

TEST(ConfigValidate, PathsOnOneHost) {
  Config config;
  for (const char* path : {"auto", "in_place", "arena", "network"}) {
    config.same_host_path = path;
    EXPECT_TRUE(IsOk(config.Validate())) << path;
  }
  config.same_host_path = "cma";
  EXPECT_TRUE(Fails(config.Validate(), absl::StatusCode::kInvalidArgument,
                    "same_host_path is 'cma' but must be one of auto, in_place, arena, network"));
}

TEST(ConfigValidate, PathsOverANetwork) {
  Config config;
  for (const char* path : {"packed", "direct", "auto"}) {
    config.network_path = path;
    EXPECT_TRUE(IsOk(config.Validate())) << path;
  }
  config.network_path = "rdma";
  EXPECT_TRUE(Fails(config.Validate(), absl::StatusCode::kInvalidArgument,
                    "network_path is 'rdma' but must be one of packed, direct, auto"));
}

TEST(ConfigValidate, DirectReadsAreNeverEmulatedOverTcp) {
  Config config;
  for (const char* tls : {"rc", "rc_x,cuda_copy", "posix,cma", "\\rc_mlx5"}) {
    config.direct_tls = tls;
    EXPECT_TRUE(IsOk(config.Validate())) << tls;
  }
  for (const char* tls : {"", "tcp", "rc,tcp", "tcp:aux,rc", "all", "^rc", "rc,", "\\tcp", "\\"}) {
    config.direct_tls = tls;
    EXPECT_TRUE(Fails(config.Validate(), absl::StatusCode::kInvalidArgument, "direct_tls is '",
                      "such as rc"))
        << tls;
  }
}

TEST(ConfigValidate, HostsThatCouldAdmitNobody) {
  Config config;
  config.allowed_hosts = "10.0.0.5, 10.1.0.0/16, *";
  EXPECT_TRUE(IsOk(config.Validate()));
  config.allowed_hosts = "10.0.0.5, 10.1.*";
  EXPECT_TRUE(
      Fails(config.Validate(), absl::StatusCode::kInvalidArgument, "allowed_hosts", "10.1.*"));
}

TEST(ConfigValidate, OffLoopbackHasToBeAskedFor) {
  Config config;
  for (const std::string host : {"10.0.0.1", "0.0.0.0", "::", "127.example.com", "prefill-0"}) {
    config.listen_host = host;
    EXPECT_TRUE(Fails(config.Validate(), absl::StatusCode::kInvalidArgument, "listen_host",
                      "key_file", "allow_insecure_network=true"))
        << host;
  }
  config.allow_insecure_network = true;
  config.listen_host = "10.0.0.1";
  EXPECT_TRUE(IsOk(config.Validate()));
  for (const std::string all : {"0.0.0.0", "::", "[::]", "*", "0", "0.0", "0x0", "000.0.0.0", "::0",
                                "[::0]", "0:0:0:0:0:0:0:0", "::%lo", "::ffff:0.0.0.0"}) {
    config.listen_host = all;
    EXPECT_TRUE(Fails(config.Validate(), absl::StatusCode::kInvalidArgument,
                      "listen_host is " + all, "goes into tickets"))
        << all;
  }
  for (const std::string one : {"0.0.0.1", "::1:0", "::ffff:10.0.0.1", "eth0", "prefill-0"}) {
    config.listen_host = one;
    EXPECT_TRUE(IsOk(config.Validate())) << one;
  }
}

// Which aborts a process that is sent a few bytes there.
TEST(ConfigValidate, UcxIsNotOffLoopbackEither) {
  for (const char* device : {"eth0", "all", "lo,eth0"}) {
    Config config;
    config.net_device = device;
    EXPECT_TRUE(IsOk(config.Validate())) << device;  // Over TCP peers have tokens.
    config.ucx_tls = "tcp";
    EXPECT_TRUE(Fails(config.Validate(), absl::StatusCode::kInvalidArgument,
                      absl::StrCat("net_device is '", device, "'"), "allow_insecure_network=true"));
    config.allow_insecure_network = true;
    EXPECT_TRUE(IsOk(config.Validate())) << device;
  }
  Config config;
  config.ucx_tls = "tcp";
  EXPECT_TRUE(IsOk(config.Validate()));
  config.net_device = "lo";
  EXPECT_TRUE(IsOk(config.Validate()));
}

TEST(ConfigValidate, AListenHostIsNeitherEmptyNorHasItAPort) {
  Config config;
  config.allow_insecure_network = true;
  config.listen_host = "";
  EXPECT_TRUE(Fails(config.Validate(), absl::StatusCode::kInvalidArgument, "listen_host is empty"));
  for (const std::string host : {"127.0.0.1:7700", "prefill-0:0", "eth0:", "tcp://10.0.0.1"}) {
    config.listen_host = host;
    EXPECT_TRUE(Fails(config.Validate(), absl::StatusCode::kInvalidArgument,
                      "listen_host is '" + host + "' but must be an address", "listen_port"));
  }
  config.listen_host = "fd00::1";
  EXPECT_TRUE(IsOk(config.Validate()));
}

TEST(ConfigSet, TakesOneFieldAsText) {
  Config config;
  EXPECT_TRUE(IsOk(config.Set("lanes", "3")));
  EXPECT_TRUE(IsOk(config.Set("checksum", "true")));
  EXPECT_TRUE(IsOk(config.Set("net_device", "eth1")));
  EXPECT_EQ(config.lanes, 3);
  EXPECT_TRUE(config.checksum);
  EXPECT_EQ(config.net_device, "eth1");
  for (const char* text : {"", "x", "4x", "99999999999999999999"}) {
    EXPECT_TRUE(
        Fails(config.Set("lanes", text), absl::StatusCode::kInvalidArgument, "lanes", "an integer"))
        << text;
    EXPECT_EQ(config.lanes, 3);
  }
  EXPECT_TRUE(Fails(config.Set("lane", "3"), absl::StatusCode::kInvalidArgument,
                    "unknown key 'lane'", "lanes"));
}

TEST(ConfigValidate, OffLoopbackAKeyIsEnoughButNotForUcx) {
  Config config;
  config.listen_host = "10.0.0.1";
  config.key_file = "/etc/kvferry.key";
  EXPECT_TRUE(IsOk(config.Validate()));
  Config with_ucx = config;
  with_ucx.ucx_tls = "rc";
  Config reads = config;
  reads.network_path = "auto";
  for (Config* each : {&with_ucx, &reads}) {
    EXPECT_TRUE(Fails(each->Validate(), absl::StatusCode::kInvalidArgument, "listen_host",
                      "asks nobody for the key", "allow_insecure_network=true"));
    each->allow_insecure_network = true;
    EXPECT_TRUE(IsOk(each->Validate()));
  }
}

TEST(ConfigValidate, AFetchMayTakeNoLongerThanTheLongest) {
  Config config;
  config.fetch_timeout_ms = config.max_fetch_timeout_ms + 1;
  EXPECT_TRUE(Fails(config.Validate(), absl::StatusCode::kInvalidArgument, "fetch_timeout_ms",
                    "max_fetch_timeout_ms (600000)"));
  config.max_fetch_timeout_ms = config.fetch_timeout_ms;
  EXPECT_TRUE(IsOk(config.Validate()));
}

TEST(Loopback, Hosts) {
  for (const char* host : {"127.0.0.1", "127.255.3.9", "::1", "[::1]", "localhost"}) {
    EXPECT_TRUE(IsLoopbackHost(host)) << host;
  }
  for (const char* host :
       {"", "127", "127.1", "127.0.0.1.", "127.example.com", "127.0.0.1.example.com", "128.0.0.1",
        "10.127.0.1", "localhost.", "LOCALHOST.example.com", "::", "0.0.0.0", "::ffff:127.0.0.1"}) {
    EXPECT_FALSE(IsLoopbackHost(host)) << host;
  }
  EXPECT_FALSE(IsLoopbackHost(absl::string_view("127.0.0.1\0x", 11)));
}

}  // namespace
}  // namespace kvferry
