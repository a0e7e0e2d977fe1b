#pragma once

#include <algorithm>
#include <cstdint>

namespace kvferry {

// What breaks a connection whose other side's kernel has not answered for so long, whether there is
// something to send or not, or has taken nothing: a path that has died would swallow all for
// minutes, and keep an idle connection for ever (tcp(7): TCP_USER_TIMEOUT, TCP_KEEPIDLE,
// TCP_KEEPINTVL).
struct SilenceLimits {
  explicit SilenceLimits(int64_t timeout_ms)
      // Less would take one packet that is lost for a dead path, and keep-alive knows seconds only.
      : user_timeout_ms(static_cast<int>(std::max<int64_t>(1000, timeout_ms))),
        probe_s(static_cast<int>(std::max<int64_t>(1, timeout_ms / 3000))) {}

  int user_timeout_ms;
  int probe_s;  // A probe after so long, and again.
};

}  // namespace kvferry
