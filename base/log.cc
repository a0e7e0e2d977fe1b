#include "base/log.h"

#include <spdlog/sinks/stdout_sinks.h>

#include <cstdlib>
#include <memory>

namespace kvferry {

spdlog::logger& Log() {
  // Leaked: other static objects may log while the process exits.
  static spdlog::logger& logger = *[] {
    auto* made = new spdlog::logger("kvferry", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    const char* level = std::getenv("KVFERRY_LOG");
    made->set_level(level != nullptr ? spdlog::level::from_str(level) : spdlog::level::warn);
    made->set_pattern("%Y-%m-%d %H:%M:%S.%e %l kvferry[%P:%t] %v");
    return made;
  }();
  return logger;
}

}  // namespace kvferry
