// A sender, its leases and several receivers in worlds in which a random number says what happens
// next: each message, each part of a chunk, each report of a lane and each thing that an owner of
// pages does is a step of its own, so that they come in orders that processes seldom meet. Whatever
// the order, no page is written or read when it is somebody else's, every fetch and every lease
// ends, and a fetch that nothing was done to ends well.
//
// KVFERRY_RANDOM_SEED begins with another world, KVFERRY_RANDOM_SECONDS goes on for longer. A seed
// gives the same steps, but for what the order of hash tables decides.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <iostream>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/thread_pool.h"
#include "connector/lease_table.h"
#include "tests/support/free_pages.h"
#include "tests/support/from_environment.h"
#include "tests/support/kv_pattern.h"
#include "tests/support/status.h"
#include "tests/support/test_config.h"
#include "tests/transport/simulated_network.h"

namespace kvferry::simulated {
namespace {

constexpr uint64_t kEpoch = 5;
constexpr uint64_t kNobodys = 1;  // The seed of what a receiver's pages hold that are free.
constexpr size_t kSteps = 1500;
constexpr int64_t kPages = 24;

// What may happen to a world beside that everything takes its time.
struct Troubles {
  bool moves = false;      // Sessions end, and what went over them goes on over others.
  bool again = false;      // Leases are taken back, and published again.
  bool cancels = false;    // Receivers give fetches up.
  bool withdraws = false;  // Owners take leases back.
  bool drops = false;      // Sessions end, and fetches with them.
  bool time = false;       // So much passes that deadlines and leases do.
  bool reads = false;      // What could be read from afar no longer can.
  bool corrupts = false;   // Bits flip.
};

using Pages = std::vector<int64_t>;

class World {
 public:
  World(uint64_t seed, const Troubles& troubles);
  // Until nothing is left to do. Failed expectations say what was wrong.
  void Run();
  const std::deque<std::string>& log() const { return log_; }

 private:
  // A request of the sender's side: what the pages of its lease hold is known from `seed` and the
  // page's position, wherever they are.
  struct Request {
    enum class State { kNotYet, kPublished, kUnpublishing, kEnded };
    uint64_t lease_id;
    uint64_t seed;
    int64_t num_pages;
    int64_t readers;
    State state = State::kNotYet;
    Pages pages{};
    int64_t ready_layers = 0;
    bool was_withdrawn = false, was_unpublished = false;
    bool was_given_up = false;  // By one of its fetches, of which the sender may not have heard.
    std::set<int64_t> taken{};  // By these readers: a fetch has ended well.
  };
  struct Fetch {
    size_t receiver;
    uint64_t id;
    uint64_t lease_id;
    int64_t reader;
    Pages positions, pages;
    bool early;
    bool pushed;  // Its pages wait to be told of a lease, by a session that they end with.
    bool assigned = false;
    std::shared_ptr<FetchHandle> handle;
    int64_t layers_seen = 0;
  };
  struct Side {  // A receiver's.
    explicit Side(const KvLayout& layout) : pool(MakePatternPool(layout, kPages, kNobodys)) {}

    std::shared_ptr<KvPool> pool;
    FreePages free{kPages};
    Metrics metrics{};
    std::unique_ptr<Links> links{};
    std::unique_ptr<PieceCopy> lanes_copy{};
    std::unique_ptr<Receiver> receiver{};
    SessionPtr session{};
  };

  Config MakeConfig();
  KvLayout MakeLayout();
  void Say(const std::string& what);
  Deadline Now() const { return begin_ + passed_; }
  bool OneIn(int64_t n) { return simulated::OneIn(n, random_); }
  template <typename T>
  T* AnyOf(std::vector<T>& all) {
    return all.empty() ? nullptr : &all[Below(static_cast<int64_t>(all.size()), random_)];
  }

  // --- The owner of the sender's pages ---
  bool BeginRequest();
  bool Publish(Request& request);
  bool NextLayer(Request& request);
  bool Withdraw(Request& request);
  bool Unpublish(Request& request);
  void WriteLayers(const Request& request, int64_t first, int64_t end);
  void LetGo(Request& request);
  bool TakeEnded();
  Request* OfLease(uint64_t lease_id);

  // --- What receivers do ---
  bool BeginFetch();
  bool Assign(Fetch& fetch);
  bool Cancel(Fetch& fetch);
  bool Look();  // At what has ended.
  void CheckLayers(Fetch& fetch);
  void CheckEnded(const Fetch& fetch);
  bool IsExcused(const Fetch& fetch);
  void Connect(size_t receiver);
  void RequestWaiting(Side& side);
  bool BecomeReady(Session& session);
  bool Close(Session& session, bool moves);

  // --- Steps ---
  bool StepOfSender();
  bool StepOfOwner();
  bool StepOfSession(Session& session);
  bool StepOfReceiver();
  bool Trouble();
  bool MessageToSender(Session& session);
  bool MessageToReceiver(Session& session);
  void PassTime(Deadline::duration time);
  void Settle();
  void CheckRest();

  Random random_;
  const Troubles troubles_;
  const Config config_;
  const KvLayout layout_;
  const Deadline begin_ = Clock::now();
  Deadline::duration passed_{};
  std::deque<std::string> log_;

  const std::shared_ptr<KvPool> pool_;
  FreePages free_{kPages};
  LeaseTable leases_{config_};
  const std::unique_ptr<Arena> arena_;
  const std::unique_ptr<Guards> guards_ = Must(Guards::Create());
  Network network_;
  Links sender_links_{&network_, /*is_sender=*/true, &random_};
  Metrics metrics_;
  Sender sender_;
  std::deque<std::function<void()>> commands_;  // Of the owner's, for the sender's thread.
  std::vector<Request> requests_;
  uint64_t last_seed_ = kNobodys;

  const std::unique_ptr<ThreadPool> threads_ = Must(ThreadPool::Create(0));
  std::deque<Side> sides_;
  std::vector<Fetch> fetches_;
  uint64_t last_id_ = 0;
  int64_t ended_well_ = 0;
  bool drains_ = false;  // Nothing new is begun.
};

Config World::MakeConfig() {
  constexpr const char* kPaths[] = {"auto", "in_place", "arena"};
  Config config;
  config.chunk_bytes = 4096 << Below(3, random_);
  config.arena_bytes = config.chunk_bytes * (2 + Below(12, random_));
  config.credits_per_transfer = 1 + Below(6, random_);
  config.checksum = troubles_.corrupts || OneIn(4);
  config.same_host_path = kPaths[Below(3, random_)];
  config.network_path = OneIn(2) ? "auto" : "direct";
  return config;
}

KvLayout World::MakeLayout() {
  if (OneIn(3)) return KvLayout::Mla(5, 8, 72, DType::kBFloat16);       // 1,152 bytes.
  if (OneIn(3)) return KvLayout::Fused(2, 16, 3, 24, DType::kFloat32);  // 9,216 bytes.
  if (OneIn(3)) return {3, 5, DType::kUint8, "own", {{"k", 1, 7}, {"v", 3, 13}}};
  return KvLayout::Mha(3, 16, 2, 32, DType::kBFloat16);  // 2 KiB.
}

World::World(uint64_t seed, const Troubles& troubles)
    : random_(seed),
      troubles_(troubles),
      config_(MakeConfig()),
      layout_(MakeLayout()),
      pool_(MakePatternPool(layout_, kPages, ++last_seed_)),
      arena_(Must(Arena::Create(config_.arena_bytes, config_.chunk_bytes))),
      network_(*pool_, arena_.get(), guards_.get(), &random_),
      sender_(config_, pool_, &leases_, arena_.get(), &sender_links_, &metrics_) {
  sender_.UseGuards(guards_.get());
  const bool crowded = OneIn(3);
  const int64_t receivers = 1 + Below(3, random_);
  for (int64_t i = 0; i < receivers; ++i) {
    Side& side = sides_.emplace_back(layout_);
    side.links = std::make_unique<Links>(&network_, /*is_sender=*/false, &random_, crowded);
    side.lanes_copy = std::make_unique<PieceCopy>(threads_.get());
    side.receiver =
        std::make_unique<Receiver>(config_, threads_.get(), side.links.get(), &side.metrics);
    Connect(static_cast<size_t>(i));
  }
}

void World::Say(const std::string& what) {
  constexpr size_t kMostLines = 300;
  log_.push_back(what);
  if (log_.size() > kMostLines) log_.pop_front();
}

// ---------------------------------------------------------------- the owner

World::Request* World::OfLease(uint64_t lease_id) {
  const auto found = std::find_if(requests_.begin(), requests_.end(),
                                  [&](const Request& r) { return r.lease_id == lease_id; });
  return found == requests_.end() ? nullptr : &*found;
}

bool World::BeginRequest() {
  constexpr size_t kMostAtOnce = 4;  // Whose pages there are, whatever happens.
  const auto live = std::count_if(requests_.begin(), requests_.end(), [](const Request& r) {
    return r.state != Request::State::kEnded;
  });
  if (drains_ || live >= static_cast<int64_t>(kMostAtOnce)) return false;
  const uint64_t lease_id = ++last_id_;
  requests_.push_back({.lease_id = lease_id,
                       .seed = ++last_seed_,
                       .num_pages = 1 + Below(6, random_),
                       .readers = OneIn(4) ? 2 : 1});
  Say(absl::StrCat("lease ", lease_id, " of ", requests_.back().num_pages, " pages for ",
                   requests_.back().readers, " readers"));
  return true;
}

void World::WriteLayers(const Request& request, int64_t first, int64_t end) {
  Pages positions(request.num_pages);
  std::iota(positions.begin(), positions.end(), 0);
  std::vector<int64_t> buffers;
  for (int64_t layer = first; layer < end; ++layer) {
    for (int64_t tensor = 0; tensor < layout_.num_tensors(); ++tensor) {
      buffers.push_back(layout_.buffer_index(layer, tensor));
    }
  }
  WritePattern(*pool_, buffers, request.pages, request.seed, positions);
}

bool World::Publish(Request& request) {
  if (request.state != Request::State::kNotYet) return false;
  if (!free_.Has(request.num_pages)) return false;
  request.pages = free_.Take(request.num_pages, random_);
  request.ready_layers = OneIn(2) ? layout_.num_layers : Below(layout_.num_layers, random_);
  WriteLayers(request, 0, request.ready_layers);
  const auto lasts = std::chrono::seconds(troubles_.time ? 1 + Below(60, random_) : 3600);
  const absl::Status published =
      leases_.Publish(request.lease_id, Must(PageRuns::FromPages(request.pages)),
                      request.ready_layers, Now() + lasts);
  EXPECT_TRUE(IsOk(published));
  commands_.emplace_back([this, id = request.lease_id] { sender_.OnLeaseChanged(id); });
  request.state = Request::State::kPublished;
  Say(absl::StrCat("lease ", request.lease_id, " is published with ", request.ready_layers,
                   " layers"));
  return true;
}

bool World::NextLayer(Request& request) {
  if (request.state != Request::State::kPublished || request.ready_layers == layout_.num_layers) {
    return false;
  }
  WriteLayers(request, request.ready_layers, request.ready_layers + 1);
  // It may have ended, and nobody has looked yet: then it is an error to say more of it.
  if (!leases_.SetReadyLayers(request.lease_id, request.ready_layers + 1).ok()) return false;
  ++request.ready_layers;
  commands_.emplace_back([this, id = request.lease_id] { sender_.OnLeaseChanged(id); });
  return true;
}

bool World::Withdraw(Request& request) {
  if (request.state != Request::State::kPublished) return false;
  const absl::StatusOr<bool> ended = leases_.Withdraw(request.lease_id);
  if (!ended.ok()) return false;  // It has ended before.
  request.was_withdrawn = true;
  Say(absl::StrCat("lease ", request.lease_id, " is taken back"));
  if (!*ended) {
    commands_.emplace_back([this, id = request.lease_id] {
      sender_.AbortLease(id, absl::AbortedError("taken back"), /*again=*/false);
    });
  }
  return true;
}

bool World::Unpublish(Request& request) {
  if (request.state != Request::State::kPublished || request.was_withdrawn) return false;
  const absl::StatusOr<bool> gone = leases_.Unpublish(request.lease_id);
  if (!gone.ok()) return false;
  request.was_unpublished = true;
  Say(absl::StrCat("lease ", request.lease_id, " is taken back for now"));
  if (*gone) {
    LetGo(request);
    request.state = Request::State::kNotYet;
    return true;
  }
  request.state = Request::State::kUnpublishing;
  commands_.emplace_back([this, id = request.lease_id] {
    sender_.AbortLease(id, absl::AbortedError("taken back for now"), /*again=*/true);
    Request& of = *OfLease(id);
    if (of.state != Request::State::kUnpublishing) return;  // Somebody has looked already.
    if (leases_.CheckNotEnded(id).ok()) {
      LetGo(of);
      of.state = Request::State::kNotYet;
    } else {
      of.state = Request::State::kPublished;  // TakeEnded() says so.
    }
  });
  return true;
}

// The pages are the owner's again, who writes into them.
void World::LetGo(Request& request) {
  FillPattern(*pool_, ++last_seed_, request.pages);
  free_.GiveBack(request.pages);
  request.pages.clear();
}

bool World::TakeEnded() {
  const std::vector<EndedLease> ended = leases_.TakeEnded();
  for (const EndedLease& lease : ended) {
    Request& request = *OfLease(lease.lease_id);
    EXPECT_NE(request.state, Request::State::kEnded) << "reported twice";
    if (lease.outcome == LeaseOutcome::kFetched) {
      EXPECT_EQ(static_cast<int64_t>(request.taken.size()), request.readers)
          << "fetched, but not by all";
    }
    EXPECT_TRUE(lease.outcome != LeaseOutcome::kExpired || troubles_.time || drains_);
    EXPECT_TRUE(lease.outcome != LeaseOutcome::kReleased || request.was_withdrawn);
    Say(absl::StrCat("lease ", lease.lease_id, " ended: ", LeaseOutcomeName(lease.outcome)));
    LetGo(request);
    request.state = Request::State::kEnded;
  }
  return !ended.empty();
}

// ---------------------------------------------------------------- receivers

void World::Connect(size_t receiver) {
  const auto brings = static_cast<Brings>(Below(kNumBrings, random_));
  sides_[receiver].session =
      network_.Connect(receiver, brings, static_cast<size_t>(1 + Below(3, random_)));
}

bool World::BecomeReady(Session& session) {
  if (session.ready || !session.receiver_open || !session.sender_open) return false;
  session.ready = true;
  sides_[session.receiver].receiver->OnPeerReady(session.at_receiver, kEpoch, session.link);
  return true;
}

bool World::BeginFetch() {
  Request* const request = AnyOf(requests_);
  if (request == nullptr || request->state == Request::State::kEnded || request->was_withdrawn) {
    return false;
  }
  const int64_t reader = Below(request->readers, random_);
  const auto is_same = [&](const Fetch& f) {
    return f.lease_id == request->lease_id && f.reader == reader;
  };
  if (request->taken.contains(reader) || std::any_of(fetches_.begin(), fetches_.end(), is_same)) {
    return false;
  }
  const size_t receiver = Below(static_cast<int64_t>(sides_.size()), random_);
  Side& side = sides_[receiver];
  // All behind a prefix that is there already: now and then of all pages.
  const int64_t first = OneIn(2) ? 0 : Below(request->num_pages + 1, random_);
  Pages positions(request->num_pages - first);
  std::iota(positions.begin(), positions.end(), first);
  if (!side.free.Has(std::ssize(positions))) return false;
  const Pages pages = side.free.Take(std::ssize(positions), random_);
  EXPECT_TRUE(HoldsPages(*side.pool, pages, kNobodys, pages, 0, layout_.num_layers))
      << "written when it was nobody's";

  const auto plan = std::make_shared<const StreamPlan>(
      Must(StreamPlan::Create(side.pool, Must(PageRuns::FromPages(pages)))));
  const uint64_t id = ++last_id_;
  auto handle = std::make_shared<FetchHandle>(std::make_shared<const PageRuns>(plan->pages()),
                                              plan->num_layers(), plan->total_bytes(), [] {});
  const bool pushed = request->state == Request::State::kPublished && OneIn(5);
  const bool early = !pushed && (request->state != Request::State::kPublished || OneIn(3));
  const Ticket ticket{"tcp://prefill:1", early ? 0 : kEpoch, pushed ? 0 : request->lease_id,
                      request->num_pages, 0};
  const auto lasts = std::chrono::seconds(troubles_.time ? 1 + Below(60, random_) : 3600);
  side.receiver->Add({.id = id,
                      .handle = handle,
                      .ticket = ticket,
                      .positions = Must(PageRuns::FromPages(positions)),
                      .plan = plan,
                      .deadline = Now() + lasts,
                      .created = Clock::now(),
                      .peer = pushed ? PeerKey() : side.session->at_receiver,
                      .redial = !pushed,
                      .early = early,
                      .reader = {reader, request->readers}});
  RequestWaiting(side);
  fetches_.push_back({.receiver = receiver,
                      .id = id,
                      .lease_id = request->lease_id,
                      .reader = reader,
                      .positions = positions,
                      .pages = pages,
                      .early = early,
                      .pushed = pushed,
                      .handle = std::move(handle)});
  Say(absl::StrCat("fetch ", id, " of lease ", request->lease_id, " from ", first,
                   pushed  ? ", pushed"
                   : early ? ", early"
                           : "",
                   ", by ", side.session->at_receiver));
  return true;
}

void World::RequestWaiting(Side& side) {
  if (!side.session->ready) return;
  side.receiver->OnPeerReady(side.session->at_receiver, kEpoch, side.session->link);
}

bool World::Assign(Fetch& fetch) {
  if (!fetch.pushed || std::exchange(fetch.assigned, true)) return false;
  Side& side = sides_[fetch.receiver];
  Receiver::Fetch* const assigned =
      side.receiver->Assign(fetch.id, side.session->at_receiver, fetch.lease_id);
  if (assigned == nullptr) return false;  // It has ended.
  assigned->ticket.epoch = kEpoch;
  RequestWaiting(side);
  return true;
}

bool World::Cancel(Fetch& fetch) {
  if (fetch.handle->done()) return false;
  OfLease(fetch.lease_id)->was_given_up = true;
  sides_[fetch.receiver].receiver->Cancel(fetch.id, absl::CancelledError("not wanted"));
  EXPECT_TRUE(fetch.handle->done());
  return true;
}

void World::CheckLayers(Fetch& fetch) {
  const int64_t layers = fetch.handle->layers_done();
  EXPECT_GE(layers, fetch.layers_seen) << "fetch " << fetch.id;
  if (layers > fetch.layers_seen) {
    EXPECT_TRUE(HoldsPages(*sides_[fetch.receiver].pool, fetch.pages, OfLease(fetch.lease_id)->seed,
                           fetch.positions, 0, layers))
        << "fetch " << fetch.id << " after " << layers << " layers";
  }
  fetch.layers_seen = layers;
}

bool World::IsExcused(const Fetch& fetch) {
  const Request& request = *OfLease(fetch.lease_id);
  return request.was_given_up || request.was_withdrawn ||
         (request.was_unpublished && !fetch.early) ||
         ((troubles_.moves || troubles_.reads) && fetch.pushed) || troubles_.time ||
         troubles_.drops || troubles_.corrupts;
}

void World::CheckEnded(const Fetch& fetch) {
  const KvPool& pool = *sides_[fetch.receiver].pool;
  Request& request = *OfLease(fetch.lease_id);
  const absl::Status status = fetch.handle->status();
  Say(absl::StrCat("fetch ", fetch.id, " ended: ", status.ToString()));
  if (status.ok()) {
    ++ended_well_;
    request.taken.insert(fetch.reader);
    EXPECT_EQ(fetch.handle->layers_done(), layout_.num_layers);
  } else {
    EXPECT_TRUE(IsExcused(fetch)) << "fetch " << fetch.id << ": " << status.ToString();
    request.was_given_up = true;
  }
  // What is not missing is there.
  Pages pages, positions;
  const Pages missing = fetch.handle->missing_pages();
  for (size_t i = 0; i < fetch.pages.size(); ++i) {
    if (std::find(missing.begin(), missing.end(), fetch.pages[i]) != missing.end()) continue;
    pages.push_back(fetch.pages[i]);
    positions.push_back(fetch.positions[i]);
  }
  EXPECT_TRUE(!status.ok() || missing.empty());
  EXPECT_TRUE(HoldsPages(pool, pages, request.seed, positions, 0, layout_.num_layers))
      << "fetch " << fetch.id << ": " << status.ToString();
}

bool World::Look() {
  for (Fetch& fetch : fetches_) CheckLayers(fetch);
  const auto ended = std::partition(fetches_.begin(), fetches_.end(),
                                    [](const Fetch& fetch) { return !fetch.handle->done(); });
  const bool any = ended != fetches_.end();
  for (auto fetch = ended; fetch != fetches_.end(); ++fetch) {
    CheckEnded(*fetch);
    Side& side = sides_[fetch->receiver];
    FillPattern(*side.pool, kNobodys, fetch->pages);
    side.free.GiveBack(fetch->pages);
  }
  fetches_.erase(ended, fetches_.end());
  return any;
}

// A receiver finds its session ended, and has another one.
bool World::Close(Session& session, bool moves) {
  if (!session.receiver_open) return false;
  Say(absl::StrCat(session.at_receiver, moves ? " ends, what it had moves" : " ends"));
  Side& side = sides_[session.receiver];
  const PeerKey old = session.at_receiver;
  std::vector<Receiver::Fetch> fetches;
  if (moves) fetches = side.receiver->TakeUnfinished(old);
  network_.CloseAtReceiver(session);
  side.receiver->OnPeerGone(old, absl::UnavailableError("the session ended"));
  Connect(session.receiver);
  for (Receiver::Fetch& fetch : fetches) {
    fetch.peer = side.session->at_receiver;
    side.receiver->Add(std::move(fetch));
  }
  return true;
}

// ---------------------------------------------------------------- steps

bool World::MessageToSender(Session& session) {
  if (!session.sender_open || session.to_sender.empty()) return false;
  MessageBody body = std::move(session.to_sender.front());
  session.to_sender.pop_front();
  if (auto* fetch = std::get_if<FetchMsg>(&body)) {
    sender_.OnFetch(session.at_sender, session.link, std::move(*fetch));
  } else if (const auto* done = std::get_if<DoneMsg>(&body)) {
    Look();  // Before the lease ends as fetched.
    sender_.OnDone(session.at_sender, *done);
  } else {
    sender_.OnCancel(session.at_sender, std::get<CancelMsg>(body));
  }
  return true;
}

bool World::MessageToReceiver(Session& session) {
  if (!session.receiver_open || session.to_receiver.empty()) return false;
  const MessageBody body = std::move(session.to_receiver.front());
  session.to_receiver.pop_front();
  Receiver& receiver = *sides_[session.receiver].receiver;
  if (const auto* refuse = std::get_if<RefuseMsg>(&body)) {
    receiver.OnRefuse(session.at_receiver, *refuse);
  } else {
    receiver.OnAbort(session.at_receiver, std::get<AbortMsg>(body));
  }
  return true;
}

bool World::StepOfSession(Session& session) {
  const size_t lane = Below(static_cast<int64_t>(session.lanes.size()), random_);
  Side& side = sides_[session.receiver];
  switch (Below(10, random_)) {
    case 0:
      return MessageToSender(session);
    case 1:
      return MessageToReceiver(session);
    case 2:
      return network_.TellSent(session);
    case 3:
      return network_.HearRead(session);
    case 4:
      return network_.Leave(session, lane);
    case 5: {
      if (!session.sender_open || session.credits.empty()) return false;
      sender_.OnCredit(session.credits.front());
      session.credits.pop_front();
      return true;
    }
    case 6: {
      if (session.landed.empty()) return false;
      const Session::Landed landed = session.landed.front();
      session.landed.pop_front();
      side.receiver->OnLanded(landed.header, landed.status);
      return true;
    }
    case 7:
      return BecomeReady(session);
    case 8:
      return network_.ReadOn(session, *side.receiver);
    default:
      // While it is read in place, the sender may go on.
      return network_.Arrive(session, lane, *side.receiver, side.lanes_copy.get(), [this] {
        if (OneIn(8)) StepOfOwner();
        if (OneIn(4)) StepOfSender();
      });
  }
}

bool World::StepOfSender() {
  if (!commands_.empty() && OneIn(2)) {
    const auto command = std::move(commands_.front());
    commands_.pop_front();
    command();
    return true;
  }
  return sender_.Pump();
}

bool World::StepOfOwner() {
  if (OneIn(4)) return TakeEnded();
  if (OneIn(3)) return BeginRequest();
  Request* const request = AnyOf(requests_);
  if (request == nullptr) return false;
  if (!drains_ && troubles_.withdraws && OneIn(12)) return Withdraw(*request);
  if (!drains_ && troubles_.again && OneIn(6)) return Unpublish(*request);
  return Publish(*request) || NextLayer(*request);
}

bool World::StepOfReceiver() {
  if (OneIn(3)) return Look();
  if (!drains_ && OneIn(2)) return BeginFetch();
  Fetch* const fetch = AnyOf(fetches_);
  if (fetch != nullptr && Assign(*fetch)) return true;
  // What had no room is asked for again.
  Side& side = sides_[Below(static_cast<int64_t>(sides_.size()), random_)];
  const size_t before = side.session->to_sender.size();
  RequestWaiting(side);
  return side.session->to_sender.size() > before;
}

bool World::Trouble() {
  const SessionPtr session =
      network_.sessions()[Below(static_cast<int64_t>(network_.sessions().size()), random_)];
  // Each side finds out by itself, in whatever order.
  const bool other_has_closed = session->sender_open != session->receiver_open;
  const bool ends = (troubles_.moves || troubles_.drops) && !drains_ && OneIn(20);
  if ((ends || other_has_closed) && OneIn(2)) {
    if (!session->sender_open) {
      return Close(*session, troubles_.moves && (!troubles_.drops || OneIn(2)));
    }
    Say(absl::StrCat(session->at_sender, " ends"));
    network_.CloseAtSender(*session);
    sender_.OnPeerGone(session->at_sender, absl::UnavailableError("the session ended"));
    return true;
  }
  if (ends) return Close(*session, troubles_.moves && (!troubles_.drops || OneIn(2)));
  if (drains_) return false;
  if (troubles_.reads && OneIn(20)) {
    return network_.BreakReads(*session, *sides_[session->receiver].receiver);
  }
  if (troubles_.cancels && OneIn(20)) {
    Fetch* const fetch = AnyOf(fetches_);
    return fetch != nullptr && Cancel(*fetch);
  }
  if (troubles_.corrupts && OneIn(20)) {
    return network_.Corrupt(*session, Below(static_cast<int64_t>(session->lanes.size()), random_));
  }
  if (troubles_.time && OneIn(40)) PassTime(std::chrono::seconds(Below(20, random_)));
  return false;
}

void World::PassTime(Deadline::duration time) {
  passed_ += time;
  sender_.Tick(Now());
  for (Side& side : sides_) side.receiver->Tick(Now());
}

// Until nothing happens any more, however long it is tried.
void World::Settle() {
  constexpr int kFutile = 2000, kMostSteps = 400000;
  drains_ = true;
  int futile = 0;
  for (int step = 0; futile < kFutile; ++step) {
    ASSERT_LT(step, kMostSteps) << "it never comes to rest";
    bool any = StepOfSender();
    any |= StepOfOwner();
    any |= StepOfReceiver();
    for (size_t i = 0; i < network_.sessions().size(); ++i) {
      const SessionPtr session = network_.sessions()[i];
      any |= StepOfSession(*session);
    }
    any |= Trouble();
    futile = any ? 0 : futile + 1;
    network_.ForgetClosed();
  }
}

void World::CheckRest() {
  EXPECT_TRUE(fetches_.empty()) << fetches_.size() << " fetches never ended";
  EXPECT_EQ(arena_->num_taken(), 0);
  EXPECT_EQ(metrics_.transfers_active, 0);
  EXPECT_EQ(metrics_.transfers_ok + metrics_.transfers_failed, metrics_.transfers_started);
  EXPECT_EQ(leases_.num_live(), 0);
  EXPECT_EQ(free_.all().size(), static_cast<size_t>(kPages));
  for (Side& side : sides_) {
    EXPECT_EQ(side.metrics.fetches_active, 0);
    EXPECT_EQ(side.metrics.fetches_ok + side.metrics.fetches_failed, side.metrics.fetches_started);
    EXPECT_TRUE(IsUntouched(*side.pool, kNobodys));
  }
}

void World::Run() {
  for (size_t step = 0; step < kSteps && !testing::Test::HasFailure(); ++step) {
    switch (Below(8, random_)) {
      case 0:
        StepOfOwner();
        break;
      case 1:
        StepOfReceiver();
        break;
      case 2:
        StepOfSender();
        break;
      case 3:
        Trouble();
        break;
      default:
        StepOfSession(
            *network_.sessions()[Below(static_cast<int64_t>(network_.sessions().size()), random_)]);
    }
    network_.ForgetClosed();
  }
  ASSERT_NO_FATAL_FAILURE(Settle());
  // Of a lease that is published all that has been begun is there: nothing but the end of time is
  // left for what waits for others.
  for (const Fetch& fetch : fetches_) {
    EXPECT_TRUE(IsExcused(fetch)) << "fetch " << fetch.id << " hangs";
  }
  // What its readers have has ended, unless a session took the word of it along, or it came while
  // another of their fetches was still to be heard given up.
  for (const Request& request : requests_) {
    const bool all_have_it = static_cast<int64_t>(request.taken.size()) == request.readers;
    EXPECT_TRUE(!all_have_it || request.state == Request::State::kEnded || request.was_given_up ||
                troubles_.moves || troubles_.drops)
        << "lease " << request.lease_id << " goes on";
  }
  PassTime(std::chrono::hours(2));
  ASSERT_NO_FATAL_FAILURE(Settle());
  PassTime(std::chrono::hours(2));
  ASSERT_NO_FATAL_FAILURE(Settle());
  CheckRest();
}

struct Kind {
  const char* name;
  Troubles troubles;
};

class Simulation : public testing::TestWithParam<Kind> {};

TEST_P(Simulation, NoPageIsAnothersAndEverythingEnds) {
  constexpr uint64_t kWorlds = 150;
  const auto first = static_cast<uint64_t>(FromEnvironment("KVFERRY_RANDOM_SEED", 1));
  const int64_t seconds = FromEnvironment("KVFERRY_RANDOM_SECONDS", 0);
  const Deadline end = DeadlineInMs(seconds * 1000);
  for (uint64_t seed = first; seed < first + kWorlds || Clock::now() < end; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    World world(seed, GetParam().troubles);
    world.Run();
    if (!HasFailure()) continue;
    for (const std::string& line : world.log()) std::cerr << line << "\n";
    return;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Troubles, Simulation,
    testing::Values(Kind{"None", {}}, Kind{"SessionsMove", {.moves = true}},
                    Kind{"LeasesComeAgain", {.again = true}},
                    Kind{"SessionsMoveAndLeasesComeAgain", {.moves = true, .again = true}},
                    Kind{"CancelsAndWithdrawals", {.cancels = true, .withdraws = true}},
                    Kind{"TimePasses", {.moves = true, .again = true, .time = true}},
                    Kind{"ReadsFail", {.reads = true}},
                    Kind{"BitsFlip", {.moves = true, .corrupts = true}},
                    Kind{"All",
                         {.moves = true,
                          .again = true,
                          .cancels = true,
                          .withdraws = true,
                          .drops = true,
                          .time = true,
                          .reads = true,
                          .corrupts = true}}),
    [](const auto& kind) { return kind.param.name; });

}  // namespace
}  // namespace kvferry::simulated
