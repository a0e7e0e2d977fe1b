#include "tests/support/captured_log.h"

#include <spdlog/logger.h>
#include <spdlog/sinks/base_sink.h>

#include <algorithm>
#include <mutex>

#include "absl/strings/match.h"
#include "absl/strings/str_join.h"
#include "base/log.h"

namespace kvferry {
namespace {

class VectorSink : public spdlog::sinks::base_sink<std::mutex> {
 public:
  static VectorSink& Get() {
    static const std::shared_ptr<VectorSink> sink = [] {
      auto made = std::make_shared<VectorSink>();
      Log().backend().sinks().push_back(made);
      return made;
    }();
    return *sink;
  }
  std::vector<std::string> Lines() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return lines_;
  }

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    lines_.emplace_back(message.payload.data(), message.payload.size());
  }
  void flush_() override {}

  std::vector<std::string> lines_;
};

}  // namespace

CapturedLog::CapturedLog() : first_(VectorSink::Get().Lines().size()) {}

std::vector<std::string> CapturedLog::lines() const {
  std::vector<std::string> all = VectorSink::Get().Lines();
  return {all.begin() + static_cast<ptrdiff_t>(first_), all.end()};
}

bool CapturedLog::Has(std::vector<absl::string_view> parts) const {
  const std::vector<std::string> all = lines();
  return std::any_of(all.begin(), all.end(), [&](const std::string& line) {
    return std::all_of(parts.begin(), parts.end(),
                       [&](absl::string_view part) { return absl::StrContains(line, part); });
  });
}

std::string CapturedLog::ToString() const { return absl::StrJoin(lines(), "\n"); }

}  // namespace kvferry
