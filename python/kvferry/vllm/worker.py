"""The half of the connector that lives in vLLM's worker processes: it owns the endpoints.

Every method runs on the engine's own thread and none waits for a peer. The bytes move in a thread
of the endpoint. What a GPU has to compute first is waited for in another one, which says then which
layers are ready.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import kvferry
from kvferry.errors import reason_of
from kvferry.vllm.device import Point
from kvferry.vllm.layout import AdoptedCache
from kvferry.vllm.metadata import Load, LoadPart, Publication, WorkerAddress, parse_ticket
from kvferry.vllm.telemetry import FetchRecord, Trace, TransferStats, logger

# What the endpoints raise for bad input and for trouble; never a reason to stop the engine.
_REFUSED = (kvferry.Error, ValueError, MemoryError)
# The same where they are given what clients send as a ticket, which may be no Unicode.
_TICKET_REFUSED = (*_REFUSED, TypeError)
# Long against what a step without work takes, short against one with some.
_PAUSE_MS = 1
# The endpoint's thread ends transfers as soon as it is asked to, so this time is not used up, but
# when all of the process stood still meanwhile: that thread has not had its turn then.
_PREEMPTION_TIMEOUT_MS = 5000
_PREEMPTION_ATTEMPTS = 3
_ATTEMPTS = 2  # What a lease is not told then is only said with the next layers, if any.


def _log_failure(of: Future[None]) -> None:
    """Of what nobody waits for."""
    if not of.cancelled() and (error := of.exception()) is not None:
        logger.error("layers that are ready were not announced: %r", error)


@dataclass
class _Lease:
    request_id: str
    lease_id: int
    num_blocks: int
    group: int
    published: float  # time.monotonic()
    live: bool = True  # Until the endpoint says how it ended.
    saved: set[int] = field(default_factory=set)  # Layers written in this step.
    # Layers [0, ready) are final, or will be when the device has done what it has been asked for.
    ready: int = 0


class PrefillWorker:
    """Publishes prompts and says when their blocks may be freed."""

    def __init__(
        self,
        cache: AdoptedCache,
        config: kvferry.Config,
        model: str,
        name: str,
        trace: Trace,
        stats: TransferStats,
    ):
        """Listens on config.listen_host:listen_port. Raises kvferry.Error if the address is
        taken."""
        self._cache = cache
        self._trace = trace
        self._stats = stats
        self._endpoint = kvferry.PrefillEndpoint(
            cache.pool, config, model, name, heads=cache.ranks.heads, scales=cache.scales
        )
        stats.watch(f"prefill {name}", self._endpoint.metrics)
        self._leases: dict[int, _Lease] = {}
        # Held while a lease is published and added to these, and while layers of one of these are
        # said to be ready: what was asked for an earlier one of that number says nothing of it.
        self._publishing = threading.Lock()
        self._leases_of: dict[str, list[_Lease]] = {}  # By request.
        # Those that had ended, by request, when that was preempted: they do not come again.
        self._ended_before: dict[str, set[int]] = {}
        self._engine_done: set[str] = set()  # Of those requests, finished ones.
        self._computing: list[_Lease] = []  # Their last layers are written in this step.
        self._announcer: ThreadPoolExecutor | None = None  # Of what a device has to compute first.

    def address(self) -> WorkerAddress:
        return WorkerAddress(self._endpoint.address, self._endpoint.epoch)

    def release_preempted(self, request_ids: list[str], ended: Iterable[str] = ()) -> None:
        """Takes leases back before their blocks are overwritten. Those that nobody has fetched yet
        may be published again, but for those of requests that have ended, which take_finished()
        still reports.

        Raises kvferry.DeadlineExceeded if blocks may be read still: going on would give other
        requests' KV to whoever reads them.
        """
        for lease in (it for key in request_ids for it in self._leases_of.pop(key, [])):
            unpublished = lease.live and self._unpublish(lease)
            if not unpublished:
                self._ended_before.setdefault(lease.request_id, set()).add(lease.lease_id)
            if unpublished or not lease.live:
                self._forget(lease)
        for lease in (it for key in ended for it in self._leases_of.get(key, ())):
            if lease.live:
                self._take_back(lease, self._endpoint.release)

    def _unpublish(self, lease: _Lease) -> bool:
        """False: it has ended before, as fetched or expired."""
        taken_back = self._take_back(lease, self._endpoint.unpublish)
        if taken_back:
            self._trace_end(lease, "preempted")
        return taken_back

    def _take_back(self, lease: _Lease, take_back: Callable[..., None]) -> bool:
        """Waits until nothing reads its blocks. False: it has ended before."""
        for left in reversed(range(_PREEMPTION_ATTEMPTS)):
            try:
                take_back(lease.lease_id, timeout_ms=_PREEMPTION_TIMEOUT_MS)
                break
            except kvferry.FailedPrecondition:
                return False
            except kvferry.NotFound:
                break  # The attempt before has come through since.
            except kvferry.DeadlineExceeded as error:
                logger.error(
                    "the blocks of preempted %s may be read still: %s", lease.request_id, error
                )
                if left == 0:
                    raise
        return True

    def withdraw(self, request_ids: list[str]) -> None:
        """Takes leases back whose blocks stay until take_finished() reports them."""
        for lease in (it for key in request_ids for it in self._leases_of.get(key, ())):
            if not lease.live:
                continue
            try:
                self._endpoint.release(lease.lease_id, timeout_ms=0)
            except kvferry.DeadlineExceeded:
                pass  # Ends when the transfer that reads it has stopped.
            except _REFUSED as error:
                logger.debug("withdrawing %s: %s", lease.request_id, reason_of(error))

    def give_up(self, lease_ids: list[int]) -> None:
        """Lets those go who may be waiting for what will not be published."""
        for lease_id in lease_ids:
            self._give_up(lease_id)

    def _give_up(self, lease_id: int) -> None:
        for _ in range(_ATTEMPTS):
            try:
                self._endpoint.give_up(lease_id)
                return
            except (kvferry.Error, ValueError) as error:  # It was published.
                logger.debug("giving up lease %x: %s", lease_id, error)
                return
            except MemoryError as error:
                logger.error("cannot give up lease %x: %s", lease_id, reason_of(error))

    def asked_for(self, lease_ids: list[int]) -> set[int]:
        """Those of them that another engine has room for, or does not need. Asked in each step."""
        try:
            return set(self._endpoint.asked_for(lease_ids))
        except _REFUSED as error:
            logger.error("cannot see which leases are asked for: %s", reason_of(error))
            return set()

    def publish(self, publications: list[Publication]) -> None:
        """Offers what the coming forward computes the last token of: no layer is ready yet."""
        for new in publications:
            lease = _Lease(
                new.request_id, new.lease_id, len(new.block_ids), new.group, time.monotonic()
            )
            leases = self._leases_of.setdefault(new.request_id, [])
            if new.lease_id in self._ended_before.get(new.request_id, ()):
                continue
            try:
                with self._publishing:
                    self._endpoint.publish(
                        new.block_ids, num_tokens=new.num_tokens, lease_id=new.lease_id
                    )
                    self._leases[new.lease_id] = lease
            except _REFUSED as error:
                self._refuse(lease, error)
            else:
                leases.append(lease)
                self._computing.append(lease)

    def _refuse(self, lease: _Lease, error: Exception) -> None:
        """Whoever waits for it need not. Unless it is another request's with the same transfer_id
        and prompt, which keeps it."""
        level, advice = logging.ERROR, ""
        if isinstance(error, kvferry.AlreadyExists):  # Clients can cause it as they like.
            level = logging.WARNING
            advice = "; a transfer_id serves once, another attempt needs a new one"
        reason = reason_of(error)
        logger.log(level, "cannot publish the KV of %s: %s%s", lease.request_id, reason, advice)
        self.give_up([lease.lease_id])
        self._trace_end(lease, "refused")

    def layer_saved(self, layer_name: str) -> None:
        """The layer's KV of this step is in the cache, or the device has been asked for it."""
        layer = self._cache.layer_index.get(layer_name)
        if layer is None:
            return
        group = self._cache.group_of.get(layer_name)
        for lease in self._computing:
            if lease.group == group:
                lease.saved.add(layer)
        self._announce(self._computing)

    def step_saved(self) -> None:
        """All layers' KV of this step is in the cache, or the device has been asked for it."""
        for lease in self._computing:
            lease.saved.update(range(self._cache.num_layers))
        self._announce(self._computing)
        self._computing.clear()

    def _announce(self, leases: list[_Lease]) -> None:
        """Says which layers are ready, at once or when the device is done with them."""
        grown: list[tuple[_Lease, int]] = []
        for lease in leases:
            ready = lease.ready
            while ready in lease.saved:
                ready += 1
            if ready > lease.ready:
                grown.append((lease, ready))
        if not grown:
            return
        try:
            self._tell_when_ready(grown)
        except (RuntimeError, MemoryError) as error:  # No thread, or no memory.
            logger.error("layers stay unsent until the next are ready: %s", reason_of(error))
            return
        for lease, ready in grown:
            lease.ready = ready

    def _tell_when_ready(self, grown: list[tuple[_Lease, int]]) -> None:
        point = self._cache.device.point()
        if point is None:
            self._mark_ready(grown)
            return
        self._announcer = self._announcer or ThreadPoolExecutor(1, "kvferry-ready")
        announced = self._announcer.submit(self._mark_ready_after, point, grown)
        announced.add_done_callback(_log_failure)

    def _mark_ready_after(self, point: Point, grown: list[tuple[_Lease, int]]) -> None:
        try:
            point()
        except Exception as error:  # Of the device.
            logger.error("the device failed, and what it was to compute stays unsent: %s", error)
            return
        self._mark_ready(grown)

    def _mark_ready(self, grown: list[tuple[_Lease, int]]) -> None:
        for lease, ready in grown:
            with self._publishing:
                if self._leases.get(lease.lease_id) is lease:
                    self._tell_ready(lease, ready)

    def _tell_ready(self, lease: _Lease, ready: int) -> None:
        """Never raises: the leases behind it would lose what is said of them."""
        for _ in range(_ATTEMPTS):
            try:
                self._endpoint.layer_ready(lease.lease_id, ready - 1)
                return
            except (kvferry.NotFound, kvferry.FailedPrecondition) as error:  # It has ended.
                logger.debug("%s: %s", lease.request_id, error)
                return
            except Exception as error:  # Of memory that is out.
                logger.error(
                    "cannot tell whoever fetches %s that %d layers are ready: %s",
                    lease.request_id,
                    ready,
                    reason_of(error),
                )

    def take_finished(self, engine_finished: set[str]) -> set[str]:
        """Requests that the engine has finished and whose leases have all ended, each once."""
        for lease_id, outcome in self._endpoint.take_ended():
            lease = self._leases.get(lease_id)
            if lease is None:
                continue
            lease.live = False
            if lease not in self._leases_of.get(lease.request_id, ()):
                self._forget(lease)  # It ended as its request was preempted.
            self._trace_end(lease, outcome)
            if outcome == "expired":
                self._stats.record_expired()
                logger.warning(
                    "nobody fetched the KV of %s within %.1f s; its %d blocks are freed",
                    lease.request_id,
                    time.monotonic() - lease.published,
                    lease.num_blocks,
                )
        for request_id in engine_finished:
            self._ended_before.pop(request_id, None)
        self._engine_done |= engine_finished & self._leases_of.keys()
        finished = {
            key for key in self._engine_done if not any(it.live for it in self._leases_of[key])
        }
        for lease in (it for key in finished for it in self._leases_of.pop(key)):
            self._forget(lease)
        self._engine_done -= finished
        return finished

    def _forget(self, lease: _Lease) -> None:
        if self._leases.get(lease.lease_id) is lease:
            del self._leases[lease.lease_id]

    def _trace_end(self, lease: _Lease, outcome: str) -> None:
        self._trace.write(
            "lease",
            request_id=lease.request_id,
            outcome=outcome,
            blocks=lease.num_blocks,
            held_ms=round((time.monotonic() - lease.published) * 1e3, 3),
        )

    def close(self) -> None:
        """Ends all transfers."""
        if self._announcer is not None:
            self._announcer.shutdown(wait=False, cancel_futures=True)
        self._endpoint.close()


@dataclass
class _Fetch:
    """Of one part of a load, from one rank of the prefill side."""

    part: LoadPart
    ticket: str = ""  # If the prefill side can be told that nobody will come.
    reader: tuple[int, int] = (0, 1)
    handle: kvferry.FetchHandle | None = None  # None: nothing was started.
    failure: str = ""

    @property
    def done(self) -> bool:
        return self.handle is None or self.handle.done

    def missing(self) -> list[int]:
        return self.part.block_ids if self.handle is None else self.handle.missing_pages()

    def error(self) -> str:
        """Why it did not go well; everything may have arrived nevertheless, and then nothing is
        missing."""
        if self.handle is None:
            return self.failure
        return "" if self.handle.ok or not self.missing() else self.handle.error


@dataclass
class _Loading:
    load: Load
    fetches: list[_Fetch]
    cancelled: bool = False


class DecodeWorker:
    """Fetches prompts and says when they have arrived, and which blocks have not."""

    def __init__(
        self,
        cache: AdoptedCache,
        config: kvferry.Config,
        model: str,
        name: str,
        trace: Trace,
        stats: TransferStats,
    ):
        self.pool = cache.pool
        self._ranks = cache.ranks
        self._trace = trace
        self._stats = stats
        self._endpoint = kvferry.DecodeEndpoint(
            cache.pool,
            config,
            model,
            name,
            heads=cache.ranks.heads,
            converts_pages=cache.converts_pages,
            scales=cache.scales,
        )
        stats.watch(f"decode {name}", self._endpoint.metrics)
        self._loading: dict[str, _Loading] = {}
        self._not_let_go: list[tuple[str, str]] = []  # Tickets, and why; said once a step.
        self._dismissals: list[tuple[str, kvferry.FetchHandle]] = []
        self._missing_blocks: set[int] = set()
        self._failed: set[str] = set()

    def load(self, loads: list[Load]) -> None:
        """Starts fetches. One that cannot be started is reported as failed by take_finished()."""
        for load in loads:
            fetches = [fetch for part in load.parts for fetch in self._start(load, part)]
            self._loading[load.request_id] = _Loading(load, fetches)

    def _start(self, load: Load, part: LoadPart) -> list[_Fetch]:
        if load.error:
            return [_Fetch(part, failure=load.error)]
        try:
            shares = self._shares(part.tickets)
        except ValueError as error:
            return [_Fetch(part, failure=str(error))]
        fetches = []
        for share in shares:
            ticket = part.tickets[share.rank]
            if share.heads[1] == 0:
                self._let_go(ticket, share.reader)
            else:
                fetches.append(self._start_one(load, part, ticket, share))
        return fetches

    def keep(self, waiting: list[list[str]]) -> None:
        """Asks the prefill side not to give up what is under tickets that will be fetched later.
        Once more before that is over, so one time may be lost."""
        given = [parse_ticket(tickets[rank]) for tickets in waiting for rank in self._of(tickets)]
        try:
            self._endpoint.keep([ticket for ticket in given if ticket is not None])
        except _REFUSED as error:
            logger.error("cannot ask for leases to be kept: %s", reason_of(error))

    def _of(self, tickets: list[str]) -> list[int]:
        """Whose tickets this rank fetches, or lets go of."""
        try:
            return [share.rank for share in self._shares(tickets)]
        except ValueError:
            return []  # The load says so.

    def _shares(self, tickets: list[str]) -> list[kvferry.RankShare]:
        """What this rank has to do with those that gave out the tickets. Raises ValueError when
        the engines' numbers of ranks cannot share the heads out."""
        ranks = self._ranks
        return kvferry.shares_for(ranks.total_heads, ranks.rank, ranks.size, len(tickets))

    def _start_one(self, load: Load, part: LoadPart, text: str, share: kvferry.RankShare) -> _Fetch:
        try:
            ticket = kvferry.Ticket.parse(text)
            if (ticket.num_tokens, ticket.num_pages) != (load.num_tokens, part.num_blocks):
                error = (
                    f"the ticket is for a prompt of {ticket.num_tokens} tokens in "
                    f"{ticket.num_pages} blocks and this one has {load.num_tokens} in "
                    f"{part.num_blocks}: both engines need the same prompt, and the decode engine "
                    f"the kv_transfer_params of the prefill engine unchanged"
                )
                return _Fetch(part, text, share.reader, failure=error)
            # Before there is a handle: what had begun and was lost for want of memory would write.
            fetch = _Fetch(part, text, share.reader)
            fetch.handle = self._endpoint.fetch(
                text, part.first_block, part.block_ids, heads=share.heads, reader=share.reader
            )
            return fetch
        except _TICKET_REFUSED as error:
            return _Fetch(part, failure=reason_of(error))

    def cancel(self, request_ids: list[str]) -> None:
        """Asks for the end of fetches; take_finished() reports them as usual."""
        for loading in (self._loading[key] for key in request_ids if key in self._loading):
            loading.cancelled = True
            for fetch in loading.fetches:
                if fetch.handle is not None:
                    with contextlib.suppress(MemoryError):  # Then it ends by its deadline.
                        fetch.handle.cancel()

    def dismiss(self, tickets: list[str]) -> None:
        """Tells the prefill side that nobody will fetch, so that it need not wait for the
        expiry."""
        if not tickets:
            return  # What came with the request were none.
        try:
            shares = self._shares(tickets)
        except ValueError as error:
            logger.warning("cannot let go of tickets %.200r: %s", tickets, error)
            return
        for share in shares:
            self._let_go(tickets[share.rank], share.reader)

    def _let_go(self, ticket: str, reader: tuple[int, int]) -> None:
        try:
            handle = self._endpoint.fetch(ticket, 0, [], reader=reader)
        except _TICKET_REFUSED as error:
            self._not_let_go.append((ticket, reason_of(error)))
            return
        self._dismissals.append((ticket, handle))

    def pause(self) -> None:
        """Waits up to a millisecond for a fetch under way.

        An engine that has nothing but loads to wait for takes step after step, and with them a
        whole core, which the prefill engine may want if it is on the same machine.
        """
        under_way = [
            [fetch.handle for fetch in loading.fetches if not fetch.done]
            for loading in self._loading.values()
        ]
        if not under_way or not all(under_way):
            return  # Nothing to wait for, or somebody has waited long enough.
        try:
            under_way[0][0].wait(_PAUSE_MS)
        except (kvferry.Error, MemoryError):
            pass  # take_finished() says how it ended, if it has.

    def take_finished(self) -> set[str]:
        """Requests whose fetches have ended, well or not, each once. Nothing writes to their
        blocks."""
        finished = {
            key for key, it in self._loading.items() if all(fetch.done for fetch in it.fetches)
        }
        for request_id in finished:
            self._finish(self._loading.pop(request_id))
        self._reap_dismissals()
        return finished

    def take_missing_blocks(self) -> set[int]:
        """Blocks of the requests that take_finished() reported whose bytes did not all arrive."""
        missing, self._missing_blocks = self._missing_blocks, set()
        return missing

    def take_failed(self) -> set[str]:
        """Those requests themselves."""
        failed, self._failed = self._failed, set()
        return failed

    def _finish(self, loading: _Loading) -> None:
        missing = {block for fetch in loading.fetches for block in fetch.missing()}
        record = _record(loading, len(missing))
        record.log()
        self._stats.record(record)
        self._trace.write("fetch", **vars(record), gb_per_s=round(record.gb_per_s, 4))
        self._missing_blocks.update(missing)
        if missing:
            self._failed.add(loading.load.request_id)
        for fetch in loading.fetches:
            if fetch.ticket and fetch.error():
                self._let_go(fetch.ticket, fetch.reader)

    def _reap_dismissals(self) -> None:
        failed, self._not_let_go = self._not_let_go, []
        under_way = []
        for ticket, handle in self._dismissals:
            if not handle.done:
                under_way.append((ticket, handle))
            elif not handle.ok:
                failed.append((ticket, handle.error))
        self._dismissals = under_way
        if failed:
            ticket, error = failed[0]
            logger.warning("could not let go of %d tickets; %.200r: %s", len(failed), ticket, error)

    def close(self) -> None:
        """Ends all fetches."""
        self._endpoint.close()


def _record(loading: _Loading, blocks_missing: int) -> FetchRecord:
    load, fetches = loading.load, loading.fetches
    reports = [fetch.handle.report() for fetch in fetches if fetch.handle is not None]
    waits = [report.get("wait_seconds", 0.0) for report in reports]
    ends = [
        wait + report.get("move_seconds", 0.0) for wait, report in zip(waits, reports, strict=True)
    ]
    # Fetches of one load start together.
    wait_ms = min(waits, default=0.0) * 1e3
    errors = [error for fetch in fetches if (error := fetch.error())]
    return FetchRecord(
        request_id=load.request_id,
        ok=not errors,
        error=errors[0] if errors else "",
        cancelled=loading.cancelled,
        blocks=len(load.block_ids),
        blocks_skipped=load.blocks_skipped,
        blocks_missing=blocks_missing,
        bytes=sum(int(report.get("bytes_done", 0)) for report in reports),
        wait_ms=round(wait_ms, 3),
        move_ms=round(max(ends, default=0.0) * 1e3 - wait_ms, 3),
    )
