"""The scheduler's side of the vLLM connector: decides what is loaded and what is saved. It copies nothing."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from kvtier.chain import block_name
from kvtier.client import Client
from kvtier.errors import KvtierError
from kvtier.lease import Lease
from kvtier.words import Layout, Namespace, Reason

log = logging.getLogger("kvtier")

_DECIDERS = 4  # fetches from disk that are waited for at once
_MOST_LOADS = 3  # of one request: preempted again and again, or on pages that cannot be read, it computes


@dataclass
class LoadJob:
    """Blocks of a request that every worker fills."""

    request: str
    token: bytes
    first: int  # position of the first block
    blocks: tuple[list[int], ...]  # block ids, a list a group; 0: none is needed there


@dataclass
class SaveJob:
    """Full blocks of a request that every worker stores."""

    names: list[bytes]
    first: int
    blocks: tuple[list[int], ...]


@dataclass
class _Decision:
    """What a fetch granted, or will: held until the workers have loaded it or the request is over."""

    first: int
    lease: Lease | None = None
    future: Future[Lease] | None = None
    loading: bool = False


@dataclass
class _Tracked:
    """A request, and the ids of its blocks as the scheduler last told them."""

    request: Any
    blocks: list[list[int]] = field(default_factory=list)
    saved: int = 0  # leading blocks that need no saving any more
    loads: int = 0


class Scheduler:
    """Its methods are called by vLLM's scheduler, one at a time, and must not wait for the disk."""

    def __init__(self, client: Client, layout: Layout, salt: bytes, groups: int, fetch_timeout: float) -> None:
        self._client, self._layout, self._salt = client, layout, salt
        self._groups, self._block, self._fetch_timeout = groups, layout.block_tokens, fetch_timeout
        self._registered: Namespace | None = None
        self._requests: dict[str, _Tracked] = {}
        self._decisions: dict[str, _Decision] = {}
        self._loads: list[LoadJob] = []
        self._threads = ThreadPoolExecutor(_DECIDERS, thread_name_prefix="kvtier-fetch")
        self.loaded_blocks = self.failed_fetches = 0

    def _namespace(self) -> Namespace:
        if self._registered is None:
            self._registered = self._client.register(self._layout, self._salt)
        return self._registered

    def _track(self, request: Any) -> _Tracked:
        return self._requests.setdefault(request.request_id, _Tracked(request))

    # Loading.

    def matched(self, request: Any, computed: int) -> int | None:
        """Tokens that can be loaded beyond computed; None: not known yet."""
        tracked, first = self._track(request), computed // self._block
        names = [block_name(bytes(h)) for h in request.block_hashes[first : (request.num_tokens - 1) // self._block]]
        decision = self._decisions.get(request.request_id)
        if decision is not None and (decision.first != first or decision.loading):
            self._forget(request.request_id)
            decision = None
        if not names or tracked.loads >= _MOST_LOADS:
            return 0
        if decision is None:
            decision = self._decide(request.request_id, names, first)
        lease = self._settled(decision)
        if lease is None:
            return None if decision.future is not None else 0
        return lease.usable_blocks * self._block

    def _decide(self, request: str, names: list[bytes], first: int) -> _Decision:
        """Fetches what is in memory now; what is on disk is fetched by another thread."""
        decision = self._decisions[request] = _Decision(first)
        try:
            ns = self._namespace()
            lease = self._client.fetch(ns, names, first=first, for_group=True)
        except KvtierError as e:
            self._failed(e)
            return decision
        if any(s.block == lease.usable_blocks and s.reason is Reason.TIMEOUT for s in lease.shortfalls):
            self._drop(lease)
            decision.future = self._threads.submit(
                self._client.fetch, ns, names, first=first, for_group=True, timeout=self._fetch_timeout
            )
        else:
            decision.lease = lease
        return decision

    def _settled(self, decision: _Decision) -> Lease | None:
        if decision.future is not None and decision.future.done():
            future, decision.future = decision.future, None
            try:
                decision.lease = future.result()
            except KvtierError as e:
                self._failed(e)
        return decision.lease

    def _failed(self, e: KvtierError) -> None:
        self.failed_fetches += 1
        log.debug("fetch: %s", e)

    def _drop(self, lease: Lease) -> None:
        """Ends a lease and its decision, neither of which waits for the node."""
        try:
            if lease.adopt_token:
                self._client.drop_decision(lease.adopt_token)
        except KvtierError:
            pass  # it ended with the attachment
        lease.release(wait=False)

    def _forget(self, request: str) -> None:
        decision = self._decisions.pop(request, None)
        if decision is None:
            return
        if decision.future is not None:
            decision.future.add_done_callback(self._drop_late)
        if decision.lease is not None:
            self._drop(decision.lease)

    def _drop_late(self, future: Future[Lease]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._drop(future.result())

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """The blocks to load into are known, or the request goes on without a load."""
        decision = self._decisions.get(request.request_id)
        if external_tokens <= 0 or decision is None or decision.lease is None:
            if decision is not None and not decision.loading:
                self._forget(request.request_id)
            return
        first, count = decision.first, external_tokens // self._block
        tracked = self._track(request)
        tracked.loads += 1
        decision.loading = True
        tracked.saved = max(tracked.saved, first + count)
        ids = tuple(list(group[first : first + count]) for group in blocks.get_block_ids())
        self._loads.append(LoadJob(request.request_id, decision.lease.adopt_token, first, ids))
        self.loaded_blocks += count

    def loaded(self, requests: set[str]) -> None:
        """Every worker is done with the loads of these requests."""
        for request in requests:
            self._forget(request)

    # Saving.

    def jobs(self, output: Any) -> tuple[list[LoadJob], list[SaveJob]]:
        """What the workers do in this step."""
        saves: list[SaveJob] = []
        for new in output.scheduled_new_reqs:
            tracked = self._requests.get(new.req_id)
            if tracked is not None:
                tracked.blocks = [list(group) for group in new.block_ids]
                self._save(tracked, new.num_computed_tokens + output.num_scheduled_tokens[new.req_id], saves)
        cached = output.scheduled_cached_reqs
        for i, request in enumerate(cached.req_ids):
            tracked = self._requests.get(request)
            if tracked is None:
                continue
            more = cached.new_block_ids[i]
            if request in cached.resumed_req_ids:
                tracked.blocks = [list(group) for group in more or ((),) * self._groups]
            elif more is not None:
                for have, added in zip(tracked.blocks, more, strict=True):
                    have.extend(added)
            self._save(tracked, cached.num_computed_tokens[i] + output.num_scheduled_tokens[request], saves)
        loads, self._loads = self._loads, []
        return loads, saves

    def _save(self, tracked: _Tracked, computed: int, into: list[SaveJob]) -> None:
        """Asks for the blocks that this step fills. Tokens that vLLM may still reject have no hash yet."""
        hashes = tracked.request.block_hashes
        full = min(computed // self._block, len(hashes), *(len(group) for group in tracked.blocks))
        first = tracked.saved
        if full <= first:
            return
        names = [block_name(bytes(h)) for h in hashes[first:full]]
        into.append(SaveJob(names, first, tuple(group[first:full] for group in tracked.blocks)))
        tracked.saved = full

    def finished(self, request: Any) -> None:
        """The request is over. A load under way keeps its pages until the workers are done with it."""
        self._requests.pop(request.request_id, None)
        decision = self._decisions.get(request.request_id)
        if decision is not None and not decision.loading:
            self._forget(request.request_id)

    def close(self) -> None:
        for request in list(self._decisions):
            self._forget(request)
        self._threads.shutdown()
        self._client.close()
