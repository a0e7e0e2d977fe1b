#pragma once

// Not spdlog/logger.h, nor fmt/format.h: with those, each file that logs compiles all of fmt's
// formatting once more, which takes longer than the rest of the file.
#ifdef SPDLOG_FMT_EXTERNAL
#include <fmt/core.h>
#else
#include <spdlog/fmt/fmt.h>
#endif

#include <utility>

namespace spdlog {
class logger;
}  // namespace spdlog

namespace kvferry {

enum class LogLevel { kTrace, kDebug, kInfo, kWarn, kError };

// Formats as fmt does, and checks the format while compiling. Thread-safe.
class Logger {
 public:
  explicit Logger(spdlog::logger* backend) : backend_(backend) {}

  template <typename... Args>
  void log(LogLevel level, fmt::format_string<Args...> format, Args&&... args) const {
    if (Enabled(level)) Write(level, format, fmt::make_format_args(args...));
  }
  template <typename... Args>
  void debug(fmt::format_string<Args...> format, Args&&... args) const {
    log(LogLevel::kDebug, format, std::forward<Args>(args)...);
  }
  template <typename... Args>
  void info(fmt::format_string<Args...> format, Args&&... args) const {
    log(LogLevel::kInfo, format, std::forward<Args>(args)...);
  }
  template <typename... Args>
  void warn(fmt::format_string<Args...> format, Args&&... args) const {
    log(LogLevel::kWarn, format, std::forward<Args>(args)...);
  }
  template <typename... Args>
  void error(fmt::format_string<Args...> format, Args&&... args) const {
    log(LogLevel::kError, format, std::forward<Args>(args)...);
  }

  // What writes the lines, for who wants them elsewhere as well.
  spdlog::logger& backend() const { return *backend_; }

 private:
  bool Enabled(LogLevel level) const;
  void Write(LogLevel level, fmt::string_view format, fmt::format_args args) const;

  spdlog::logger* const backend_;
};

// The process-wide logger "kvferry" (stderr, for which nobody waits: StderrSink). Level from
// KVFERRY_LOG = trace | debug | info | warn | error | off, default warn, read at first use. A
// message stays on one line. Thread-safe.
const Logger& Log();

}  // namespace kvferry
