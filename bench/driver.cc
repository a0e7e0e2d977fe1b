#include "bench/driver.h"

#include <cstdio>
#include <cstring>
#include <iostream>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "examples/two_node/pattern.h"
#include "examples/two_node/support.h"
#include "pool/pool_memory.h"

namespace kvferry::bench {
namespace {

absl::StatusOr<examples::Pattern> ParsePattern(const std::string& salt) {
  uint64_t value = 0;
  if (!absl::SimpleAtoi(salt, &value)) {
    return absl::InvalidArgumentError(absl::StrCat("'", salt, "' is no salt"));
  }
  return examples::Pattern(value);
}

// All pages, between pools of the same shape of which one lies in `memory`, the other there or on
// the host.
absl::Status CopyPages(const KvPool& from, const KvPool& to, const PoolMemory& memory) {
  std::vector<BytesMove> moves;
  for (size_t i = 0; i < from.buffer_infos().size(); ++i) {
    const BufferInfo& buffer = from.buffer_infos()[i];
    moves.push_back({buffer.address, to.buffer_infos()[i].address, buffer.bytes});
  }
  return memory.MoveApart(moves);
}

// The pool itself, or of one that the processor cannot touch a copy in host memory.
absl::StatusOr<std::shared_ptr<KvPool>> OnHost(const std::shared_ptr<KvPool>& pool) {
  if (pool->memory().on_host()) return pool;
  KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<KvPool> twin,
                           KvPool::CreateIn(pool->layout(), pool->num_pages(), HostMemory()));
  KVFERRY_RETURN_IF_ERROR(CopyPages(*pool, *twin, pool->memory()));
  return twin;
}

// What was changed in what OnHost() gave.
absl::Status PutBack(const KvPool& on_host, const KvPool& pool) {
  if (&on_host == &pool) return absl::OkStatus();
  return CopyPages(on_host, pool, pool.memory());
}

}  // namespace

Driver::Driver(std::shared_ptr<KvPool> pool) : pool_(std::move(pool)) {
  Add("cpu", 0, [](const Words&) -> Answer {
    return nlohmann::json{{"cpu", examples::CpuSeconds()}};
  });
  Add("fill", 1, [this](const Words& words) -> Answer {
    KVFERRY_ASSIGN_OR_RETURN(const examples::Pattern pattern, ParsePattern(words[0]));
    const PageRun all{0, pool_->num_pages()};
    KVFERRY_ASSIGN_OR_RETURN(const PageRuns pages, PageRuns::FromRuns({&all, 1}));
    KVFERRY_ASSIGN_OR_RETURN(const std::shared_ptr<KvPool> on_host, OnHost(pool_));
    pattern.FillPages(*on_host, pages);
    KVFERRY_RETURN_IF_ERROR(PutBack(*on_host, *pool_));
    return nlohmann::json::object();
  });
  Add("zero", 1, [this](const Words& words) -> Answer {
    KVFERRY_ASSIGN_OR_RETURN(const PageRuns pages, examples::ParseRuns(words[0]));
    KVFERRY_RETURN_IF_ERROR(pages.CheckWithin(pool_->num_pages()));
    KVFERRY_ASSIGN_OR_RETURN(const std::shared_ptr<KvPool> on_host, OnHost(pool_));
    examples::ZeroPages(*on_host, pages);
    KVFERRY_RETURN_IF_ERROR(PutBack(*on_host, *pool_));
    return nlohmann::json::object();
  });
  Add("verify", 3, [this](const Words& words) -> Answer {
    KVFERRY_ASSIGN_OR_RETURN(const examples::Pattern pattern, ParsePattern(words[0]));
    KVFERRY_ASSIGN_OR_RETURN(const PageRuns local, examples::ParseRuns(words[1]));
    KVFERRY_ASSIGN_OR_RETURN(const PageRuns remote, examples::ParseRuns(words[2]));
    KVFERRY_RETURN_IF_ERROR(local.CheckWithin(pool_->num_pages()));
    KVFERRY_ASSIGN_OR_RETURN(const std::shared_ptr<KvPool> on_host, OnHost(pool_));
    KVFERRY_RETURN_IF_ERROR(pattern.Verify(*on_host, local, remote));
    return nlohmann::json::object();
  });
}

void Driver::Add(const std::string& name, size_t arguments, Handler handler) {
  commands_[name] = {arguments, std::move(handler)};
}

Answer Driver::Dispatch(const std::string& line) const {
  Words words = absl::StrSplit(line, ' ');
  const auto found = commands_.find(words[0]);
  if (found == commands_.end() || found->second.arguments != words.size() - 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("no command '", words[0], "' with ", words.size() - 1, " arguments"));
  }
  words.erase(words.begin());
  return found->second.handler(words);
}

int Driver::Run() {
  const nlohmann::json ready = {
      {"ready", true}, {"ucx", KVFERRY_UCX_VERSION}, {"build", KVFERRY_BUILD_TYPE}};
  std::cout << ready.dump() << std::endl;
  for (std::string line; std::getline(std::cin, line) && line != "quit";) {
    const Answer answer = Dispatch(line);
    const nlohmann::json out =
        answer.ok() ? *answer : nlohmann::json{{"error", answer.status().ToString()}};
    std::cout << out.dump() << std::endl;
  }
  return 0;
}

absl::StatusOr<std::shared_ptr<KvPool>> TouchedPool(const KvLayout& layout, int64_t num_pages,
                                                    bool is_private) {
  KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<KvPool> pool,
                           is_private ? KvPool::CreateIn(layout, num_pages, HostMemory())
                                      : KvPool::Create(layout, num_pages));
  for (const BufferInfo& buffer : pool->buffer_infos()) {
    std::memset(buffer.address, 0, buffer.bytes);
  }
  return pool;
}

int Fail(const std::string& name, const absl::Status& status) {
  std::cerr << name << ": " << status.ToString() << std::endl;
  return 1;
}

}  // namespace kvferry::bench
