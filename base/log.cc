#include "base/log.h"

#include <spdlog/logger.h>
#include <spdlog/pattern_formatter.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>

#include "base/stderr_sink.h"

namespace kvferry {
namespace {

// The message with control characters as \xNN: peers choose some of the words in it, and must not
// be able to forge a line or to talk to the terminal.
class OneLine : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg& message, const std::tm&,
              spdlog::memory_buf_t& out) override {
    constexpr char kHex[] = "0123456789abcdef";
    for (const char c : message.payload) {
      const auto byte = static_cast<unsigned char>(c);
      if (byte >= 0x20 && byte != 0x7f) {
        out.push_back(c);
      } else {
        for (const char escaped : {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]})
          out.push_back(escaped);
      }
    }
  }
  std::unique_ptr<custom_flag_formatter> clone() const override {
    return std::make_unique<OneLine>();
  }
};

// The level in KVFERRY_LOG, if that is one.
std::optional<spdlog::level::level_enum> LevelFrom(const char* text) {
  const auto level = spdlog::level::from_str(text);  // What it does not know is "off" to it.
  const bool known = level != spdlog::level::off || std::strcmp(text, "off") == 0;
  return known ? std::optional(level) : std::nullopt;
}

static_assert(static_cast<int>(LogLevel::kTrace) == spdlog::level::trace);
static_assert(static_cast<int>(LogLevel::kError) == spdlog::level::err);
spdlog::level::level_enum OfSpdlog(LogLevel level) {
  return static_cast<spdlog::level::level_enum>(level);
}

spdlog::logger* MakeLogger() {
  auto* made = new spdlog::logger("kvferry", std::make_shared<StderrSink>());
  const char* text = std::getenv("KVFERRY_LOG");
  const std::optional<spdlog::level::level_enum> level =
      text != nullptr ? LevelFrom(text) : spdlog::level::warn;
  made->set_level(level.value_or(spdlog::level::warn));
  auto formatter = std::make_unique<spdlog::pattern_formatter>();
  formatter->add_flag<OneLine>('*').set_pattern("%Y-%m-%d %H:%M:%S.%e %l kvferry[%P:%t] %*");
  made->set_formatter(std::move(formatter));
  if (!level) {
    made->warn(
        "KVFERRY_LOG is '{}', but must be trace, debug, info, warn, error or off: warn it is",
        text);
  }
  return made;
}

}  // namespace

bool Logger::Enabled(LogLevel level) const { return backend_->should_log(OfSpdlog(level)); }

void Logger::Write(LogLevel level, fmt::string_view format, fmt::format_args args) const {
  backend_->log(OfSpdlog(level), fmt::vformat(format, args));
}

const Logger& Log() {
  // Leaked: other static objects may log while the process exits.
  static const Logger& logger = *new Logger(MakeLogger());
  return logger;
}

}  // namespace kvferry
