#include "python/endpoints.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/cancel_and_wait.h"
#include "base/clock.h"
#include "base/config.h"
#include "base/random.h"
#include "base/utf8.h"
#include "connector/decode_endpoint.h"
#include "connector/prefill_endpoint.h"
#include "connector/tensor_parallel.h"
#include "pool/kv_pool.h"
#include "python/closable.h"
#include "python/convert.h"
#include "python/gil.h"
#include "python/status_error.h"
#include "transport/ticket.h"

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT(google-build-using-namespace): "name"_a

namespace kvferry {
namespace {

using PoolPtr = std::shared_ptr<KvPool>;

// A wait inside C++ hears no Ctrl-C, so it is one of many short ones.
constexpr int64_t kWaitMs = 200;

// As type hints have them.
using Fetched = nb::typed<nb::object, FetchHandle>;
using Pushed = nb::typed<nb::object, PushHandle>;
using Received = nb::typed<nb::object, std::pair<std::string, std::shared_ptr<FetchHandle>>>;

// (first head, total) or (first head, count), and (index, of).
using Pair = std::pair<int64_t, int64_t>;

template <typename Endpoint>
class PyEndpoint : public Closable<Endpoint> {
 public:
  PyEndpoint(const PoolPtr& pool, const Config& config, const std::string& model,
             const std::string& name, Pair heads, bool converts_pages, std::vector<float> scales,
             bool accept_pushes = false)
      : Closable<Endpoint>(Value(Endpoint::Create(ForAnyThread(pool), {config,
                                                                       model,
                                                                       name,
                                                                       accept_pushes,
                                                                       {heads.first, heads.second},
                                                                       converts_pages,
                                                                       std::move(scales)})),
                           "endpoint") {}
};
using Prefill = PyEndpoint<PrefillEndpoint>;
using Decode = PyEndpoint<DecodeEndpoint>;

void TakeBack(const Prefill& self, absl::Status (PrefillEndpoint::*how)(uint64_t, Deadline),
              uint64_t lease_id, int64_t timeout_ms) {
  Check(self.CallWithoutGil([&](PrefillEndpoint& endpoint) {
    return (endpoint.*how)(lease_id, DeadlineInMs(timeout_ms));
  }));
}

// What has begun, for Python. Where there is no memory for its object its pages are the caller's
// again, who has no handle: not before nothing moves there any more, which the deadline bounds.
template <typename Object, typename Handle, typename Make>
Object Begun(const std::shared_ptr<Handle>& handle, const Make& make) {
  try {
    return make();
  } catch (...) {
    const ReleasedGil nogil;
    CancelAndWait(*handle);
    throw;
  }
}

// A list is taken as it is: it has been copied from Python's, and may be long.
std::vector<int64_t> PageList(IntegersInput given) {
  if (auto* const list = std::get_if<std::vector<int64_t>>(&given)) return std::move(*list);
  const CountList list(given, "page");
  const std::span<const int64_t> pages = list;
  return {pages.begin(), pages.end()};
}

// The ticket is made first: what is published when there is no memory for it could not be told to
// anybody.
nb::str Publish(const Prefill& self, IntegersInput given, int64_t num_tokens, uint64_t lease_id,
                int64_t ready_layers, int64_t lease_ms) {
  std::vector<int64_t> pages = PageList(std::move(given));
  const std::shared_ptr<PrefillEndpoint> endpoint = self.get();
  if (lease_id == 0) lease_id = RandomId();
  const std::string ticket = Ticket{endpoint->address(), endpoint->epoch(), lease_id,
                                    static_cast<int64_t>(pages.size()), num_tokens}
                                 .ToString();
  nb::str text(ticket.data(), ticket.size());
  Check(
      endpoint->Publish({std::move(pages), num_tokens, lease_id, ready_layers, lease_ms}).status());
  return text;
}

void BindTicket(nb::module_& module) {
  nb::class_<Ticket> ticket(module, "Ticket",
                            "What a decode process needs to fetch; see transport/ticket.h.");
  ticket
      .def(
          "__init__",
          [](Ticket* self, const std::string& address, uint64_t epoch, uint64_t lease_id,
             int64_t num_pages, int64_t num_tokens) {
            const Ticket ticket{address, epoch, lease_id, num_pages, num_tokens};
            new (self) Ticket(Value(Ticket::Parse(ticket.ToString())));
          },
          nb::kw_only(), "address"_a, "epoch"_a, "lease_id"_a, "num_pages"_a, "num_tokens"_a,
          "epoch 0: of whichever process listens there, which may publish the request later.")
      .def_static(
          "parse", [](const std::string& text) { return Value(Ticket::Parse(text)); }, "text"_a)
      .def_ro("address", &Ticket::address)
      .def_ro("epoch", &Ticket::epoch)
      .def_ro("lease_id", &Ticket::lease_id)
      .def_ro("num_pages", &Ticket::num_pages)
      .def_ro("num_tokens", &Ticket::num_tokens)
      .def("__str__", &Ticket::ToString);
  DefineEquality(ticket, [](const Ticket& self) { return self.ToString(); });
}

void BindReceiveTicket(nb::module_& module) {
  nb::class_<ReceiveTicket> ticket(module, "ReceiveTicket",
                                   "What a prefill process needs to push; see transport/ticket.h.");
  ticket
      .def_static(
          "parse", [](const std::string& text) { return Value(ReceiveTicket::Parse(text)); },
          "text"_a)
      .def_ro("address", &ReceiveTicket::address)
      .def_ro("epoch", &ReceiveTicket::epoch)
      .def_ro("receive_id", &ReceiveTicket::receive_id)
      .def_ro("num_pages", &ReceiveTicket::num_pages)
      .def_ro("num_tokens", &ReceiveTicket::num_tokens)
      .def("__str__", &ReceiveTicket::ToString);
  DefineEquality(ticket, [](const ReceiveTicket& self) { return self.ToString(); });
}

// Waits for a handle's end, or for a layer, by `wait(deadline)`. An exception of Python's, such as
// Ctrl-C, ends that, and changes nothing for what is waited for.
template <typename Handle, typename Wait>
void WaitAndHear(const Handle& handle, int64_t timeout_ms, Wait wait) {
  const Deadline deadline = DeadlineInMs(timeout_ms);
  while (true) {
    const Deadline soon = std::min(deadline, DeadlineInMs(kWaitMs));
    const bool is_last = soon == deadline || handle.done();
    absl::Status status;
    {
      const ReleasedGil released;
      status = wait(soon);
    }
    // Before the last one DEADLINE_EXCEEDED may be the short wait's, or what the handle ended with.
    if (is_last || !absl::IsDeadlineExceeded(status)) return Check(status);
    if (StayAtExit([] { return PyErr_CheckSignals(); }) != 0) throw nb::python_error();
  }
}

void BindPushHandle(nb::module_& module) {
  nb::class_<PushHandle>(module, "PushHandle", "One push under way; see connector/push_handle.h.")
      .def_prop_ro("lease_id", &PushHandle::lease_id, "For layer_ready() and release().")
      .def_prop_ro("done", &PushHandle::done, "Once true, its pages are the caller's again.")
      .def_prop_ro("ok", [](const PushHandle& self) { return self.status().ok(); })
      .def_prop_ro(
          "error",
          [](const PushHandle& self) {
            return self.done() ? ValidUtf8(self.status().message()) : std::string();
          },
          "Why it failed; empty while under way and after success.")
      .def(
          "wait",
          [](const PushHandle& self, int64_t timeout_ms) {
            WaitAndHear(self, timeout_ms, [&](Deadline deadline) { return self.Wait(deadline); });
          },
          "timeout_ms"_a,
          "Returns after success, raises after failure or timeout_ms. Ctrl-C ends the wait alone.")
      .def("cancel", &PushHandle::Cancel, nb::call_guard<ReleasedGil>(),
           "Asks for the end, on both sides; done follows shortly.");
}

void BindPrefill(nb::module_& module) {
  nb::class_<Prefill>(module, "PrefillEndpoint",
                      "Publishes requests for others to fetch; see connector/prefill_endpoint.h.")
      .def(nb::init<const PoolPtr&, const Config&, const std::string&, const std::string&, Pair,
                    bool, std::vector<float>>(),
           "pool"_a, "config"_a, "model"_a, "name"_a = "", nb::kw_only(), "heads"_a = Pair(),
           "converts_pages"_a = true, "scales"_a = std::vector<float>(),
           nb::call_guard<ReleasedGil>(),
           "heads: (first, total), which of the model's KV heads the pool holds, of a "
           "tensor-parallel rank; (0, 0) is all of them. converts_pages: the other side's pages "
           "may be of another size and order (NHD, HND), if both sides say so. scales: what a "
           "value that is stored stands for is itself times this, by buffer of the pool (K of all "
           "layers, then V), each finite and above 0; empty is 1. The other side's dtype and "
           "scales may be others.")
      .def_prop_ro("address", [](const Prefill& self) { return self.get()->address(); })
      .def_prop_ro("epoch", [](const Prefill& self) { return self.get()->epoch(); })
      .def("publish", &Publish, "pages"_a, "num_tokens"_a = 0, "lease_id"_a = 0,
           "ready_layers"_a = 0, "lease_ms"_a = 0,
           "Offers a request and returns its ticket. num_tokens are the request's, of which the "
           "pages may hold a window or a part; 0 is not said. lease_id 0 draws one, lease_ms 0 is "
           "the configured.")
      .def(
          "push",
          [](const Prefill& self, const std::string& ticket, IntegersInput pages,
             int64_t num_tokens, uint64_t lease_id, int64_t ready_layers, int64_t timeout_ms) {
            const std::shared_ptr<PushHandle> push = Value(self.get()->Push(
                Value(ReceiveTicket::Parse(ticket)),
                {PageList(std::move(pages)), num_tokens, lease_id, ready_layers}, timeout_ms));
            return Begun<Pushed>(push, [&] { return Pushed(nb::cast(push)); });
          },
          "ticket"_a, "pages"_a, "num_tokens"_a = 0, "lease_id"_a = 0, "ready_layers"_a = 0,
          "timeout_ms"_a = 0,
          "Sends a request to the pages that a decode endpoint has registered by receive(), as its "
          "layers become ready. num_tokens 0 is not said, timeout_ms 0 the configured "
          "fetch_timeout_ms.")
      .def(
          "layer_ready",
          [](const Prefill& self, uint64_t lease_id, int64_t layer) {
            Check(self.get()->LayerReady(lease_id, layer));
          },
          "lease_id"_a, "layer"_a, "This layer and all before it hold their final bytes.")
      .def(
          "all_layers_ready",
          [](const Prefill& self, uint64_t lease_id) {
            Check(self.get()->AllLayersReady(lease_id));
          },
          "lease_id"_a)
      .def(
          "give_up",
          [](const Prefill& self, uint64_t lease_id) { Check(self.get()->GiveUp(lease_id)); },
          "lease_id"_a,
          "A request that was announced will not be published: fetches that wait for it fail.")
      .def(
          "asked_for",
          [](const Prefill& self, const std::vector<uint64_t>& lease_ids) {
            return self.get()->AskedFor(lease_ids);
          },
          "lease_ids"_a,
          "Those of these leases, published or not, that a decode process has asked for, or has "
          "said to need nothing of.")
      .def(
          "release",
          [](const Prefill& self, uint64_t lease_id, int64_t timeout_ms) {
            TakeBack(self, &PrefillEndpoint::Release, lease_id, timeout_ms);
          },
          "lease_id"_a, "timeout_ms"_a = 5000,
          "Takes a request back; when this returns none of its pages is read any more.")
      .def(
          "unpublish",
          [](const Prefill& self, uint64_t lease_id, int64_t timeout_ms) {
            TakeBack(self, &PrefillEndpoint::Unpublish, lease_id, timeout_ms);
          },
          "lease_id"_a, "timeout_ms"_a = 5000,
          "Takes a request back that will be published again, under the same lease_id: fetches by "
          "tickets without an epoch wait for that. When this returns none of its pages is read any "
          "more.")
      .def(
          "take_ended",
          [](const Prefill& self) {
            std::vector<std::pair<uint64_t, std::string>> ended;
            for (const EndedLease& lease : self.get()->TakeEnded()) {
              ended.emplace_back(lease.lease_id, std::string(LeaseOutcomeName(lease.outcome)));
            }
            return ended;
          },
          "(lease_id, 'fetched' | 'released' | 'expired') of leases that ended since the last "
          "call.")
      .def(
          "metrics",
          [](const Prefill& self) { return MetricsDict([&] { return self.get()->Metrics(); }); },
          nb::sig("def metrics(self) -> dict[str, int]"))
      .def(
          "close", [](Prefill& self) { self.Close(); },
          "Ends all transfers and joins the progress thread. When it returns no page is read any "
          "more; calls of other threads that find the endpoint closed raise when it has.");
}

void BindDecode(nb::module_& module) {
  nb::class_<FetchHandle>(module, "FetchHandle",
                          "One fetch under way; see transport/fetch_handle.h.")
      .def_prop_ro("done", &FetchHandle::done,
                   "Once true, nothing writes to the local pages any more.")
      .def_prop_ro("ok", [](const FetchHandle& self) { return self.status().ok(); })
      .def_prop_ro(
          "error",
          [](const FetchHandle& self) {
            return self.done() ? ValidUtf8(self.status().message()) : std::string();
          },
          "Why it failed; empty while under way and after success.")
      .def(
          "wait",
          [](const FetchHandle& self, int64_t timeout_ms) {
            WaitAndHear(self, timeout_ms, [&](Deadline deadline) { return self.Wait(deadline); });
          },
          "timeout_ms"_a,
          "Returns after success, raises after failure or timeout_ms. Ctrl-C ends the wait alone.")
      .def_prop_ro("layers_done", &FetchHandle::layers_done)
      .def(
          "wait_layer",
          [](const FetchHandle& self, int64_t layer, int64_t timeout_ms) {
            WaitAndHear(self, timeout_ms,
                        [&](Deadline deadline) { return self.WaitLayer(layer, deadline); });
          },
          "layer"_a, "timeout_ms"_a)
      .def("missing_pages", &FetchHandle::missing_pages,
           "Local page ids that did not arrive whole; all of them while under way.")
      .def(
          "report",
          [](const FetchHandle& self) {
            const FetchReport report = self.report();
            nb::dict dict;
            dict["total_bytes"] = report.total_bytes;
            dict["bytes_done"] = report.bytes_done;
            dict["wait_seconds"] = report.wait_seconds;
            dict["move_seconds"] = report.move_seconds;
            return dict;
          },
          nb::sig("def report(self) -> dict[str, float]"))
      .def("cancel", &FetchHandle::Cancel, "Asks for the end; done follows shortly.");

  nb::class_<Decode>(module, "DecodeEndpoint",
                     "Fetches requests into its own pages; see connector/decode_endpoint.h.")
      .def(nb::init<const PoolPtr&, const Config&, const std::string&, const std::string&, Pair,
                    bool, std::vector<float>, bool>(),
           "pool"_a, "config"_a, "model"_a, "name"_a = "", nb::kw_only(), "heads"_a = Pair(),
           "converts_pages"_a = true, "scales"_a = std::vector<float>(), "accept_pushes"_a = false,
           nb::call_guard<ReleasedGil>(),
           "heads, converts_pages, scales: as of PrefillEndpoint. accept_pushes: listen, for "
           "receive().")
      .def_prop_ro(
          "address", [](const Decode& self) { return self.get()->address(); },
          "Empty without accept_pushes.")
      .def_prop_ro("epoch", [](const Decode& self) { return self.get()->epoch(); })
      .def(
          "receive",
          [](const Decode& self, int64_t first_page, IntegersInput pages, int64_t num_tokens,
             int64_t timeout_ms) {
            DecodeEndpoint::Receiving receiving = Value(self.get()->Receive(
                {first_page, PageList(std::move(pages)), num_tokens, timeout_ms}));
            return Begun<Received>(receiving.handle, [&] {
              return Received(nb::cast(std::pair(receiving.ticket.ToString(), receiving.handle)));
            });
          },
          "first_page"_a, "pages"_a, "num_tokens"_a = 0, "timeout_ms"_a = 0,
          "Registers the local `pages` for one push of a request's pages from first_page on: "
          "(ticket for PrefillEndpoint.push, handle).")
      .def(
          "fetch",
          [](const Decode& self, const std::string& ticket, int64_t first_page, IntegersInput pages,
             int64_t timeout_ms, Pair heads, Pair reader) {
            const std::shared_ptr<FetchHandle> handle = Value(self.get()->Fetch(
                Value(Ticket::Parse(ticket)), first_page, PageList(std::move(pages)), timeout_ms,
                {{heads.first, heads.second}, {reader.first, reader.second}}));
            return Begun<Fetched>(handle, [&] { return Fetched(nb::cast(handle)); });
          },
          "ticket"_a, "first_page"_a, "pages"_a, "timeout_ms"_a = 0, nb::kw_only(),
          "heads"_a = Pair(), "reader"_a = Pair(0, 1),
          "Fetches the ticket's pages from first_page on into the local `pages`, counted in pages "
          "as the local pool has them: the other side's may be of another size or order (NHD, "
          "HND). Without pages it only tells the prefill side that its lease may end. heads "
          "(first, count) of the model's and reader (index, of) are those of a RankShare, where "
          "the other side has another number of tensor-parallel ranks.")
      .def(
          "keep",
          [](const Decode& self, const std::vector<Ticket>& tickets) { self.get()->Keep(tickets); },
          "tickets"_a,
          "Asks the prefill sides to keep what these Tickets stand for, for their lease_ms from "
          "now on. Never fails: a fetch says what has become of it.")
      .def(
          "metrics",
          [](const Decode& self) { return MetricsDict([&] { return self.get()->Metrics(); }); },
          nb::sig("def metrics(self) -> dict[str, int]"))
      .def(
          "close", [](Decode& self) { self.Close(); },
          "Ends all fetches and joins the progress thread. When it returns no page is written to "
          "any more; calls of other threads that find the endpoint closed raise when it has.");
}

void BindTensorParallel(nb::module_& module) {
  nb::class_<RankShare>(module, "RankShare",
                        "What a decode rank fetches from one rank of the prefill side; see "
                        "connector/tensor_parallel.h.")
      .def_ro("rank", &RankShare::rank, "Of the prefill side.")
      .def_prop_ro(
          "heads", [](const RankShare& self) { return Pair(self.heads.first, self.heads.count); },
          "(first, count); a count of 0: nothing, fetch no pages.")
      .def_prop_ro(
          "reader", [](const RankShare& self) { return Pair(self.reader.index, self.reader.of); },
          "(index, of).");
  module.def(
      "heads_of_rank",
      [](int64_t total_heads, int64_t rank, int64_t size) {
        const HeadRange heads = Value(HeadsOfRank(total_heads, rank, size));
        return Pair(heads.first, heads.count);
      },
      "total_heads"_a, "rank"_a, "size"_a,
      "(first, count) of the KV heads that a tensor-parallel rank holds.");
  module.def(
      "shares_for",
      [](int64_t total_heads, int64_t rank, int64_t size, int64_t prefill_size) {
        return Value(SharesFor(total_heads, rank, size, prefill_size));
      },
      "total_heads"_a, "rank"_a, "size"_a, "prefill_size"_a,
      "What a decode rank fetches, from which ranks of the prefill side.");
}

}  // namespace

void BindEndpoints(nb::module_& module) {
  BindTensorParallel(module);
  BindTicket(module);
  BindReceiveTicket(module);
  BindPushHandle(module);
  BindPrefill(module);
  BindDecode(module);
}

}  // namespace kvferry
