// The same transfer as somebody would write it by hand in a day, for bench/run.py to compare
// kvferry with: the target asks, the source gathers pages into chunks and sends each as a ZeroMQ
// message without another copy, the target scatters what comes. One connection, libzmq's defaults,
// no leases, no deadlines but one, no second reader. Besides the driver's commands
// (bench/driver.h):
//
//   source   listen HOST           {"address": TEXT}
//   target   connect ADDRESS
//            read LOCAL REMOTE     {"seconds": S, "cpu": of this process}

#include <zmq.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/slab.h"
#include "base/status.h"
#include "bench/driver.h"
#include "examples/two_node/layout_flags.h"
#include "examples/two_node/support.h"

namespace kvferry::bench {
namespace {

constexpr size_t kChunks = 64;  // Being gathered or sent: as much memory as kvferry's arena.
constexpr int kTimeoutMs = 60000;

absl::Status ZmqError(const char* what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", zmq_strerror(zmq_errno())));
}

class Message {
 public:
  Message() { zmq_msg_init(&message_); }
  ~Message() { zmq_msg_close(&message_); }
  Message(const Message&) = delete;
  Message& operator=(const Message&) = delete;

  zmq_msg_t* get() { return &message_; }
  size_t size() { return zmq_msg_size(&message_); }
  const std::byte* data() { return static_cast<const std::byte*>(zmq_msg_data(&message_)); }

 private:
  zmq_msg_t message_;
};

// A list of pages in every buffer of a pool: items in the order in which they are sent.
class Items {
 public:
  Items(const KvPool& pool, std::vector<int64_t> pages) : pool_(pool), pages_(std::move(pages)) {}

  size_t size() const { return pool_.buffer_infos().size() * pages_.size(); }
  size_t bytes() const { return static_cast<size_t>(pool_.buffer_infos()[0].item_bytes); }
  std::byte* at(size_t i) const {
    const BufferInfo& buffer = pool_.buffer_infos()[i / pages_.size()];
    return buffer.address + pages_[i % pages_.size()] * buffer.item_bytes;
  }
  size_t items_per_chunk(size_t chunk_bytes) const {
    return std::max<size_t>(1, chunk_bytes / bytes());
  }

 private:
  const KvPool& pool_;
  const std::vector<int64_t> pages_;
};

// Memory of chunks. Taken by the thread that gathers, returned by ZeroMQ's when they are sent.
class FreeChunks {
 public:
  static absl::StatusOr<std::unique_ptr<FreeChunks>> Create(size_t chunk_bytes) {
    KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> memory,
                             MapSlab(static_cast<int64_t>(kChunks * chunk_bytes)));
    std::memset(memory.get(), 0, kChunks * chunk_bytes);
    return std::unique_ptr<FreeChunks>(new FreeChunks(std::move(memory), chunk_bytes));
  }

  absl::StatusOr<std::byte*> Take() {
    MutexLock lock(&mutex_);
    const Deadline deadline = DeadlineInMs(kTimeoutMs);
    while (free_.empty()) {
      if (!returned_.WaitUntil(&mutex_, deadline) && free_.empty()) {
        return absl::DeadlineExceededError("no chunk was sent");
      }
    }
    std::byte* const chunk = free_.back();
    free_.pop_back();
    return chunk;
  }
  // A zmq_free_fn.
  static void Return(void* chunk, void* self) {
    auto* const chunks = static_cast<FreeChunks*>(self);
    MutexLock lock(&chunks->mutex_);
    chunks->free_.push_back(static_cast<std::byte*>(chunk));
    chunks->returned_.NotifyAll();
  }

 private:
  FreeChunks(std::shared_ptr<std::byte> memory, size_t chunk_bytes) : memory_(std::move(memory)) {
    for (size_t i = 0; i < kChunks; ++i) free_.push_back(memory_.get() + i * chunk_bytes);
  }

  const std::shared_ptr<std::byte> memory_;
  Mutex mutex_;
  CondVar returned_;
  std::vector<std::byte*> free_ ABSL_GUARDED_BY(mutex_);
};

// A context with its one socket, which one thread at a time uses.
class Socket {
 public:
  Socket() : context_(zmq_ctx_new()), socket_(zmq_socket(context_, ZMQ_DEALER)) {
    const int no_linger = 0;
    zmq_setsockopt(socket_, ZMQ_LINGER, &no_linger, sizeof(no_linger));
  }
  ~Socket() {
    zmq_close(socket_);
    zmq_ctx_term(context_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  void* get() const { return socket_; }
  // Ends what another thread waits for.
  void ShutDown() { zmq_ctx_shutdown(context_); }

 private:
  void* const context_;
  void* const socket_;
};

class Source {
 public:
  Source(const KvPool& pool, size_t chunk_bytes, std::unique_ptr<FreeChunks> chunks)
      : pool_(pool), chunk_bytes_(chunk_bytes), chunks_(std::move(chunks)) {}
  ~Source() {
    socket_.ShutDown();
    if (thread_.joinable()) thread_.join();
  }

  Answer Listen(const Words& words) {
    std::array<char, 256> address{};
    size_t size = address.size();
    if (zmq_bind(socket_.get(), absl::StrCat("tcp://", words[0], ":*").c_str()) != 0 ||
        zmq_getsockopt(socket_.get(), ZMQ_LAST_ENDPOINT, address.data(), &size) != 0) {
      return ZmqError("bind");
    }
    thread_ = std::thread([this] { Serve(); });
    return nlohmann::json{{"address", std::string(address.data())}};
  }

 private:
  void Serve() {
    Message request;
    while (zmq_msg_recv(request.get(), socket_.get(), 0) >= 0) {
      std::vector<int64_t> pages(request.size() / sizeof(int64_t));
      std::memcpy(pages.data(), request.data(), pages.size() * sizeof(int64_t));
      const absl::Status sent = SendAll(Items(pool_, std::move(pages)));
      if (!sent.ok()) Log().warn("plain ZeroMQ: {}", sent.ToString());
    }
  }

  absl::Status SendAll(const Items& items) {
    const size_t step = items.items_per_chunk(chunk_bytes_);
    for (size_t first = 0; first < items.size(); first += step) {
      KVFERRY_RETURN_IF_ERROR(SendChunk(items, first, std::min(first + step, items.size())));
    }
    return absl::OkStatus();
  }

  absl::Status SendChunk(const Items& items, size_t first, size_t end) {
    KVFERRY_ASSIGN_OR_RETURN(std::byte* const chunk, chunks_->Take());
    for (size_t i = first; i < end; ++i) {
      std::memcpy(chunk + (i - first) * items.bytes(), items.at(i), items.bytes());
    }
    zmq_msg_t message;
    zmq_msg_init_data(&message, chunk, (end - first) * items.bytes(), FreeChunks::Return,
                      chunks_.get());
    if (zmq_msg_send(&message, socket_.get(), 0) >= 0) return absl::OkStatus();
    zmq_msg_close(&message);
    return ZmqError("send");
  }

  const KvPool& pool_;
  const size_t chunk_bytes_;
  const std::unique_ptr<FreeChunks> chunks_;  // Outlives the socket, which returns them.
  Socket socket_;
  std::thread thread_;
};

class Target {
 public:
  Target(const KvPool& pool, size_t chunk_bytes) : pool_(pool), chunk_bytes_(chunk_bytes) {
    const int timeout = kTimeoutMs;
    zmq_setsockopt(socket_.get(), ZMQ_RCVTIMEO, &timeout, sizeof(timeout));
  }

  Answer Connect(const Words& words) {
    if (zmq_connect(socket_.get(), words[0].c_str()) != 0) return ZmqError("connect");
    return nlohmann::json::object();
  }

  Answer Read(const Words& words) {
    KVFERRY_ASSIGN_OR_RETURN(const PageRuns local, examples::ParseRuns(words[0]));
    KVFERRY_ASSIGN_OR_RETURN(const PageRuns remote, examples::ParseRuns(words[1]));
    KVFERRY_RETURN_IF_ERROR(local.CheckWithin(pool_.num_pages()));
    KVFERRY_RETURN_IF_ERROR(remote.CheckWithin(pool_.num_pages()));
    if (local.num_pages() != remote.num_pages() || local.num_pages() == 0) {
      return absl::InvalidArgumentError("read: no pages, or lists of two lengths");
    }
    const Items items(pool_, local.ToPages());
    const std::vector<int64_t> from = remote.ToPages();
    const double cpu_before = examples::CpuSeconds();
    const Deadline begin = Clock::now();
    KVFERRY_RETURN_IF_ERROR(Fetch(from, items));
    const Deadline end = Clock::now();
    return nlohmann::json{{"seconds", SecondsBetween(begin, end)},
                          {"cpu", examples::CpuSeconds() - cpu_before}};
  }

 private:
  absl::Status Fetch(const std::vector<int64_t>& from, const Items& items) {
    if (zmq_send(socket_.get(), from.data(), from.size() * sizeof(int64_t), 0) < 0) {
      return ZmqError("send");
    }
    const size_t step = items.items_per_chunk(chunk_bytes_);
    for (size_t first = 0; first < items.size(); first += step) {
      KVFERRY_RETURN_IF_ERROR(ReceiveChunk(items, first, std::min(first + step, items.size())));
    }
    return absl::OkStatus();
  }

  absl::Status ReceiveChunk(const Items& items, size_t first, size_t end) {
    Message chunk;
    if (zmq_msg_recv(chunk.get(), socket_.get(), 0) < 0) return ZmqError("receive");
    if (chunk.size() != (end - first) * items.bytes()) {
      return absl::DataLossError("a chunk of another size");
    }
    for (size_t i = first; i < end; ++i) {
      std::memcpy(items.at(i), chunk.data() + (i - first) * items.bytes(), items.bytes());
    }
    return absl::OkStatus();
  }

  const KvPool& pool_;
  const size_t chunk_bytes_;
  Socket socket_;
};

struct Flags {
  std::string role;
  examples::LayoutFlags layout;
  int64_t pool_pages = 0;
  size_t chunk_bytes = 1 << 20;
};

int RunTarget(const std::shared_ptr<KvPool>& pool, size_t chunk_bytes) {
  Target target(*pool, chunk_bytes);
  Driver driver(pool);
  driver.Add("connect", 1, [&](const Words& words) { return target.Connect(words); });
  driver.Add("read", 2, [&](const Words& words) { return target.Read(words); });
  return driver.Run();
}

absl::StatusOr<int> Run(const Flags& flags) {
  KVFERRY_ASSIGN_OR_RETURN(const KvLayout layout, flags.layout.Make());
  KVFERRY_ASSIGN_OR_RETURN(const std::shared_ptr<KvPool> pool,
                           TouchedPool(layout, flags.pool_pages));
  if (flags.role == "target") return RunTarget(pool, flags.chunk_bytes);
  const auto item_bytes = static_cast<size_t>(pool->buffer_infos()[0].item_bytes);
  KVFERRY_ASSIGN_OR_RETURN(std::unique_ptr<FreeChunks> chunks,
                           FreeChunks::Create(std::max(flags.chunk_bytes, item_bytes)));
  Source source(*pool, flags.chunk_bytes, std::move(chunks));
  Driver driver(pool);
  driver.Add("listen", 1, [&](const Words& words) { return source.Listen(words); });
  return driver.Run();
}

}  // namespace
}  // namespace kvferry::bench

int main(int argc, char** argv) {
  CLI::App app("Pages over plain ZeroMQ, for comparison; bench/run.py drives it.");
  kvferry::bench::Flags flags;
  app.add_option("--role", flags.role, "source or target")
      ->required()
      ->check(CLI::IsMember({"source", "target"}));
  app.add_option("--pool-pages", flags.pool_pages, "pages of the pool")->required();
  app.add_option("--chunk-bytes", flags.chunk_bytes, "most bytes of a message, on both sides")
      ->check(CLI::Range(size_t{1}, size_t{64} << 20));
  flags.layout.AddTo(&app);
  CLI11_PARSE(app, argc, argv);
  const absl::StatusOr<int> rc = kvferry::bench::Run(flags);
  return rc.ok() ? *rc : kvferry::bench::Fail("kvferry_bench_plain_zmq_transfer", rc.status());
}
