"""A worker's side of the vLLM connector: copies blocks between vLLM's tensors and the node's memory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from kvtier._vllm_layout import WORKS_WITH, Group, part_of
from kvtier._vllm_scheduler import LoadJob, SaveJob
from kvtier.attempt import Attempt
from kvtier.client import Client
from kvtier.errors import IncompatibleError, KvtierError, LostError
from kvtier.lease import Lease
from kvtier.words import Layout, Namespace

log = logging.getLogger("kvtier")

_LOADERS = 2  # loads at once
_COMMITS_MOST = 8  # commits under way; a save beyond them waits for the first
_SAVE_SECONDS = 0.5  # that one step may spend on finding staging; what is not saved then is not saved


class Worker:
    """Loads run on threads of their own; saves are copied within the step, before the engine can reuse a block."""

    def __init__(self, client: Client, layout: Layout, salt: bytes, groups: list[Group], rank: int, ranks: int) -> None:
        self._client, self._layout, self._salt = client, layout, salt
        self._groups, self._rank, self._ranks = groups, rank, ranks
        self._parts = [part_of(g, rank, ranks) for g in range(len(groups))]
        self._registered: Namespace | None = None
        self._blocks: list[list[torch.Tensor]] = []  # a group, a layer: [blocks, bytes of a block]
        self._loaders = ThreadPoolExecutor(_LOADERS, thread_name_prefix="kvtier-load")
        self._committer = ThreadPoolExecutor(1, thread_name_prefix="kvtier-commit")
        self._commits: list[Future[None]] = []
        self._lock = threading.Lock()
        self._received: set[str] = set()
        self._wrong: set[int] = set()  # blocks that could not be loaded
        self.saved_blocks = self.skipped_blocks = self.failed_loads = 0

    def _namespace(self) -> Namespace:
        with self._lock:
            if self._registered is None:
                self._registered = self._client.register(self._layout, self._salt)
            return self._registered

    def register(self, caches: dict[str, torch.Tensor]) -> None:
        """Takes the tensors of each layer. IncompatibleError: a block of a layer is not one run of bytes."""
        self._blocks = [[_rows(name, caches, group.block_bytes) for name in group.layers] for group in self._groups]

    # Loading.

    def load(self, jobs: Sequence[LoadJob]) -> None:
        for job in jobs:
            self._loaders.submit(self._load, job)

    def _load(self, job: LoadJob) -> None:
        wrong: set[int] = set()
        try:
            self._copy_in(job)
        except Exception as e:  # whatever it is, the engine must learn that these blocks hold nothing
            self.failed_loads += 1
            (log.debug if isinstance(e, KvtierError) else log.exception)("load: %s", e)
            wrong = {block for group in job.blocks for block in group if block}
        with self._lock:
            self._wrong |= wrong
            self._received.add(job.request)

    def _copy_in(self, job: LoadJob) -> None:
        lease = self._client.adopt(self._namespace(), job.token, parts=sum(1 << part for part in self._parts))
        self._copy_pages(job, lease)
        lease.release()  # asks: LostError if a page was reused while it was copied

    def _copy_pages(self, job: LoadJob, lease: Lease) -> None:
        for g, ids in enumerate(job.blocks):
            for row, block in enumerate(ids):
                if not block:
                    continue
                page = lease.tensor(row, self._parts[g]) if row < lease.rows else None
                if page is None:
                    raise LostError(f"the page of block {job.first + row} of group {g} is missing")
                at = 0
                for layer in self._blocks[g]:
                    size = layer.shape[1]
                    layer[block].copy_(page[at : at + size])
                    at += size
                del page

    def received(self) -> set[str]:
        """The requests whose loads have ended since the last call, for better or worse."""
        with self._lock:
            out, self._received = self._received, set()
            return out

    def load_errors(self) -> set[int]:
        with self._lock:
            out, self._wrong = self._wrong, set()
            return out

    # Saving.

    def save(self, jobs: Sequence[SaveJob]) -> None:
        """Copies blocks into staging and has them committed. It returns once nothing is read any more."""
        if not jobs:
            return
        until = time.monotonic() + _SAVE_SECONDS
        try:
            ns = self._namespace()
            for job in jobs:
                self._save(ns, job, until)
        except KvtierError as e:
            self.skipped_blocks += sum(len(job.names) for job in jobs)
            log.debug("save: %s", e)

    def _save(self, ns: Namespace, job: SaveJob, until: float) -> None:
        rows = [i for i in range(len(job.names)) if all(group[i] for group in job.blocks)]
        done = 0
        while done < len(rows):
            start = rows[done]
            run = done + 1
            while run < len(rows) and rows[run] == rows[run - 1] + 1:
                run += 1
            names = job.names[start : start + run - done]
            attempt = self._client.reserve(
                ns, names, first=job.first + start, parts=sum(1 << part for part in self._parts)
            )
            decided = next(
                (
                    i
                    for i, o in enumerate(attempt.outcomes)
                    if o.name not in ("GRANTED", "EXISTS", "IN_FLIGHT", "REPEATED")
                ),
                len(names),
            )
            if attempt.rows:
                self._fill(attempt, job, start)
                self._commit(attempt)
            done += decided
            if decided < len(names) and not attempt.rows and not self._await_staging(until):
                self.skipped_blocks += len(rows) - done
                return

    def _fill(self, attempt: Attempt, job: SaveJob, start: int) -> None:
        for row, index in enumerate(attempt.blocks):
            for g, part in enumerate(self._parts):
                page = attempt.page(row, part)
                if page is None:
                    continue
                into, at = torch.from_numpy(page), 0
                for layer in self._blocks[g]:
                    size = layer.shape[1]
                    into[at : at + size].copy_(layer[job.blocks[g][start + index]])
                    at += size

    def _commit(self, attempt: Attempt) -> None:
        self._commits = [commit for commit in self._commits if not commit.done()]
        if len(self._commits) >= _COMMITS_MOST:
            self._commits.pop(0).result()
        self._commits.append(self._committer.submit(self._publish, attempt))

    def _publish(self, attempt: Attempt) -> None:
        try:
            with attempt:
                outcomes = attempt.commit()
            self.saved_blocks += sum(outcome.stored for outcome in outcomes)
        except KvtierError as e:
            self.skipped_blocks += attempt.rows
            log.debug("commit: %s", e)

    def _await_staging(self, until: float) -> bool:
        """Waits for a commit that gives staging back."""
        self._commits = [commit for commit in self._commits if not commit.done()]
        if not self._commits or time.monotonic() > until:
            return False
        self._commits.pop(0).result()
        return True

    def close(self) -> None:
        self._loaders.shutdown()
        self._committer.shutdown()
        self._client.close()


def _rows(name: str, caches: dict[str, torch.Tensor], block_bytes: int) -> torch.Tensor:
    """The blocks of a layer as rows of bytes, without a copy."""
    cache = caches.get(name)
    if cache is None:
        raise IncompatibleError(f"vLLM registered no KV cache for layer {name}; this connector works with {WORKS_WITH}")
    if cache.device.type != "cpu":
        raise IncompatibleError(f"the KV cache is on {cache.device}; this connector has been verified on CPU only")
    block = cache[0]
    size = block.numel() * block.element_size()
    if not block.is_contiguous() or size != block_bytes:
        raise IncompatibleError(
            f"layer {name}: a block of {tuple(block.shape)}, strides {block.stride()}, {size} bytes; its group says "
            f"{block_bytes} in one run: unknown KV cache layout; this connector works with {WORKS_WITH}"
        )
    flat = torch.as_strided(cache, (cache.shape[0], block.numel()), (cache.stride(0), 1), cache.storage_offset())
    return flat.view(torch.uint8)
