#include "connector/store/host_lookup.h"

#include <netdb.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <new>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/interrupt.h"
#include "base/status.h"
#include "base/thread.h"

namespace kvferry {
namespace {

using Addresses = std::vector<std::string>;

std::string NumericOf(const addrinfo& found) {
  std::array<char, NI_MAXHOST> text{};
  const int error = getnameinfo(found.ai_addr, found.ai_addrlen, text.data(), text.size(), nullptr,
                                0, NI_NUMERICHOST);
  return error == 0 ? text.data() : "";
}

absl::StatusOr<Addresses> Resolve(const std::string& host, int family, int flags) {
  addrinfo hints{};
  hints.ai_family = family;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* read = nullptr;
  const int error = getaddrinfo(host.c_str(), nullptr, &hints, &read);
  if (error != 0) {
    return absl::UnavailableError(error == EAI_SYSTEM ? std::strerror(errno) : gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> found(read, freeaddrinfo);
  Addresses addresses;
  for (const addrinfo* one = found.get(); one != nullptr; one = one->ai_next) {
    if (std::string text = NumericOf(*one); !text.empty()) addresses.push_back(std::move(text));
  }
  if (addresses.empty()) return absl::UnavailableError("it has no address");
  return addresses;
}

absl::StatusOr<Addresses> ResolveName(const std::string& host) {
  absl::StatusOr<Addresses> found = Resolve(host, AF_INET, 0);
  if (found.ok()) return found;
  absl::StatusOr<Addresses> other = Resolve(host, AF_INET6, 0);
  return other.ok() ? other : found;
}

}  // namespace

// What one question comes to. The thread that asks has a share in it.
class HostLookup::Answer {
 public:
  void Set(absl::StatusOr<Addresses> found) {
    const MutexLock lock(&mutex_);
    found_ = std::move(found);
    changed_.NotifyAll();
  }
  bool there() {
    const MutexLock lock(&mutex_);
    return found_.has_value();
  }
  absl::StatusOr<Addresses> Wait(Deadline deadline) {
    const MutexLock lock(&mutex_);
    while (!found_ && WaitOrLook(changed_, &mutex_, deadline)) {
    }
    if (found_) return *found_;
    return absl::DeadlineExceededError("the system's resolver did not answer in time");
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::optional<absl::StatusOr<Addresses>> found_ ABSL_GUARDED_BY(mutex_);
};

absl::StatusOr<std::shared_ptr<HostLookup::Answer>> HostLookup::Ask() {
  const MutexLock lock(&mutex_);
  if (asked_ != nullptr && !asked_->there()) return asked_;
  auto answer = std::make_shared<Answer>();
  const auto run = [answer, host = host_] {
    try {
      answer->Set(ResolveName(host));
    } catch (const std::bad_alloc&) {
      answer->Set(absl::Status(absl::StatusCode::kResourceExhausted, ""));  // Takes none.
    }
  };
  KVFERRY_ASSIGN_OR_RETURN(std::thread thread, StartThread("resolver", run));
  thread.detach();
  asked_ = answer;
  return answer;
}

absl::StatusOr<std::vector<std::string>> HostLookup::Find(Deadline deadline) {
  if (Resolve(host_, AF_UNSPEC, AI_NUMERICHOST).ok()) return Addresses{host_};
  KVFERRY_ASSIGN_OR_RETURN(const std::shared_ptr<Answer> answer, Ask());
  absl::StatusOr<Addresses> found = answer->Wait(deadline);
  if (found.ok()) return found;
  const absl::string_view why = found.status().message();
  return absl::Status(found.status().code(),
                      absl::StrCat("looking the host up: ", why.empty() ? "no memory" : why));
}

}  // namespace kvferry
