"""A secondary tier of vLLM's offloading on a kvtier node: what leaves the engine's host pool is found again.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 8589934592, "blocks_per_chunk": 4, "secondary_tiers": [{"type": "KvtierTier",
          "module_path": "kvtier.vllm_tier", "endpoint": "unix:///run/kvtier/kvtier.sock"}]}}'

A row of vLLM's host region, which holds one chunk of all ranks, is a page here. vLLM's scheduler calls the methods
one at a time and waits for none of them: threads of this tier look up, and copy rows between the region and the
node's memory. A job always ends, and once it is reported nothing here touches its rows any more. A node that is
absent or killed is a miss.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import queue
import threading
import time
from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import blake3
import numpy as np
from vllm.v1.kv_offload import base as offload
from vllm.v1.kv_offload.tiering import base

from kvtier._memory import Bytes
from kvtier._vllm_layout import WORKS_WITH, sample_weights
from kvtier.chain import block_name
from kvtier.client import Client
from kvtier.errors import IncompatibleError, InvalidError, KvtierError
from kvtier.words import Layout, Mode, Namespace, Part, Tier, WriteOutcome

log = logging.getLogger("kvtier")

_EPOCH = 1
_MOVERS = 4  # jobs at once; as many as there are cores to copy with is enough
_STORE_SECONDS = 30.0  # that a store may wait for room
_OWN = ("endpoint", "token", "salt", "revision", "stall_timeout", "fetch_timeout", "staging_bytes")


@dataclass
class _Asked:
    """A key that some requests have looked up. `found` None: the answer is not there yet."""

    number: int
    requests: set[str] = field(default_factory=set)
    found: bool | None = None


class KvtierTier(base.SecondaryTierManager):  # type: ignore[misc]
    """Made by vLLM's factory, in the scheduler's process."""

    medium = offload.Medium.STORAGE

    def __new__(cls, *_: Any, **__: Any) -> KvtierTier:
        check_interface(cls)
        made: KvtierTier = super().__new__(cls)
        return made

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **config: Any) -> None:
        of_vllm = set(inspect.signature(base.SecondaryTierManager.__init__).parameters)
        handed = {k: config.pop(k) for k in list(config) if k in of_vllm}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **handed)
        locality, events = config.pop("locality", None), bool(config.pop("enable_kv_events", False))
        if locality is not None:
            self.locality = offload.Locality(locality)
        unknown = sorted(set(config) - set(_OWN))
        if unknown:
            raise InvalidError(
                f"unknown keys {unknown} in the tier's configuration; known are {', '.join(_OWN)}, locality and "
                "enable_kv_events"
            )
        endpoint = str(config.get("endpoint", "unix:///run/kvtier/kvtier.sock"))
        if not endpoint.startswith("unix://"):
            raise InvalidError(f"endpoint is {endpoint!r}, want unix:// and the path of the node's socket")
        rows, self._row_bytes = primary_kv_view.shape or (0, 0)
        self._rows: Bytes = np.frombuffer(primary_kv_view.cast("B"), np.uint8).reshape(rows, self._row_bytes)
        self._layout = layout_of(offloading_spec, self._row_bytes, str(config.get("revision", "")))
        self._salt = str(config.get("salt", "")).encode()
        self._fetch_timeout = float(config.get("fetch_timeout", 2.0))
        self._client = Client(
            endpoint.removeprefix("unix://"),
            token=str(config.get("token", "")),
            engine="vllm-tier",
            stall_timeout=float(config.get("stall_timeout", 0.25)),
            staging_bytes=int(config.get("staging_bytes", 0)),
        )
        self._registered: Namespace | None = None
        self._registering = threading.Lock()
        # The scheduler's: only its thread touches them.
        self._asked: dict[Any, _Asked] = {}
        self._of_request: dict[str, set[Any]] = {}
        self._to_ask: list[tuple[Any, int]] = []
        self._asking = self._numbers = 0
        self._jobs: dict[int, tuple[Any, Future[Any]]] = {}
        spec_events = getattr(offloading_spec, "kv_events_config", None)
        on = events and bool(getattr(spec_events, "enable_kv_cache_events", False))
        self._events: list[Any] | None = [] if on else None
        # What the threads hand back.
        self._answers: queue.SimpleQueue[list[tuple[Any, int, bool]]] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[tuple[Any, list[Any]]] = queue.SimpleQueue()
        self._looker = ThreadPoolExecutor(1, thread_name_prefix="kvtier-tier-lookup")
        self._movers = ThreadPoolExecutor(_MOVERS, thread_name_prefix="kvtier-tier")
        self.failed_jobs = 0

    def _namespace(self) -> Namespace:
        with self._registering:
            if self._registered is None:
                self._registered = self._client.register(self._layout, self._salt)
            return self._registered

    # Looking up: asked with the end of a step, answered in a later one.

    def lookup(self, key: Any, req_context: Any) -> Any:
        self._collect()
        asked = self._asked.get(key)
        if asked is None or (asked.found is False and req_context.req_id not in asked.requests):
            # A miss holds for those who saw it; who comes later asks again.
            self._numbers += 1
            asked = self._asked[key] = _Asked(self._numbers, asked.requests if asked is not None else set())
            self._to_ask.append((key, asked.number))
        asked.requests.add(req_context.req_id)
        self._of_request.setdefault(req_context.req_id, set()).add(key)
        if asked.found is None:
            return offload.LookupResult.RETRY
        return offload.LookupResult.HIT if asked.found else offload.LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        self._collect()
        batch = [(key, number) for key, number in self._to_ask if self._current(key, number)]
        self._to_ask = []
        if batch:
            self._asking += 1
            self._looker.submit(self._look, batch)

    def _current(self, key: Any, number: int) -> bool:
        asked = self._asked.get(key)
        return asked is not None and asked.number == number

    def _look(self, batch: list[tuple[Any, int]]) -> None:
        there = [False] * len(batch)
        try:
            found = self._client.lookup(self._namespace(), [block_name(bytes(key)) for key, _ in batch])
            there = [tier is not Tier.NONE for tier in found.tiers]
        except KvtierError as e:
            log.debug("lookup: %s", e)
        except Exception:  # a request waits for the answer
            log.exception("lookup")
        self._answers.put([(key, number, yes) for (key, number), yes in zip(batch, there, strict=True)])

    def _collect(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                answers = self._answers.get_nowait()
                self._asking -= 1
                for key, number, found in answers:
                    if self._current(key, number):
                        self._asked[key].found = found

    def on_new_request(self, req_context: Any) -> Any:
        return offload.RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        for key in self._of_request.pop(req_context.req_id, ()):
            asked = self._asked.get(key)
            if asked is not None:
                asked.requests.discard(req_context.req_id)
                if not asked.requests:
                    del self._asked[key]

    # Moving rows.

    def submit_store(self, job_metadata: Any) -> None:
        self._submit(job_metadata, self._store)

    def submit_load(self, job_metadata: Any) -> None:
        self._submit(job_metadata, self._load)

    def _submit(self, job: Any, do: Any) -> None:
        keys, rows = list(job.keys), _rows_of(job)
        self._jobs[job.job_id] = job, self._movers.submit(self._run, job, do, keys, rows)

    def _run(self, job: Any, do: Any, keys: list[Any], rows: list[int]) -> None:
        began, good, new = time.monotonic(), [False] * len(keys), []
        try:
            if len(rows) != len(keys) or any(not 0 <= row < len(self._rows) for row in rows):
                raise InvalidError(f"job {job.job_id}: {len(rows)} rows of {len(self._rows)} for {len(keys)} keys")
            good, new = do(keys, rows)
        except KvtierError as e:
            log.debug("job %d: %s", job.job_id, e)
        except Exception:  # a job that is not reported keeps its rows for ever
            log.exception("job %d", job.job_id)
        self._finished.put((self._result(job, keys, good, time.monotonic() - began), new))

    def _result(self, job: Any, keys: list[Any], good: list[bool], seconds: float) -> Any:
        done = [key for key, ok in zip(keys, good, strict=True) if ok]
        more = {
            "successful_keys": done if job.is_promotion and len(done) < len(keys) else None,
            "transfer_time": seconds,
            "transfer_bytes": len(done) * self._row_bytes,
        }
        known = inspect.signature(base.JobResult).parameters
        return base.JobResult(job.job_id, len(done) == len(keys), **{k: v for k, v in more.items() if k in known})

    def _store(self, keys: list[Any], rows: list[int]) -> tuple[list[bool], list[Any]]:
        def fill(at: int, part: int, page: Bytes) -> None:
            page[:] = self._rows[rows[at]]

        names = [block_name(bytes(key)) for key in keys]
        outcomes = self._client.write(self._namespace(), names, fill, timeout=_STORE_SECONDS)
        new = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is WriteOutcome.COMMITTED]
        return [outcome.stored for outcome in outcomes], new

    def _load(self, keys: list[Any], rows: list[int]) -> tuple[list[bool], list[Any]]:
        names, good = [block_name(bytes(key)) for key in keys], [False] * len(keys)
        lease = self._client.fetch(self._namespace(), names, mode=Mode.SET, timeout=self._fetch_timeout)
        for at in range(min(lease.rows, len(rows))):
            page = lease.page(at)
            if page is not None:
                self._rows[rows[at]] = page
                good[at] = True
            del page
        lease.release()  # LostError: a page was reused while it was copied; none of them counts
        return good, []

    def get_finished_jobs(self) -> Iterable[Any]:
        out = []
        with contextlib.suppress(queue.Empty):
            while True:
                result, new = self._finished.get_nowait()
                job, _ = self._jobs.pop(result.job_id, (None, None))
                out.append(result)
                if not result.success:
                    self.failed_jobs += 1
                    self._forget_misses(job, result)
                if self._events is not None and new:
                    self._events.append(offload.OffloadingEvent(new, self.medium, False, locality=self.locality))
        return out

    def _forget_misses(self, job: Any, result: Any) -> None:
        """What could not be loaded is no hit for the requests that wait for it."""
        if job is None or not job.is_promotion:
            return
        loaded = set(getattr(result, "successful_keys", None) or ())
        for key in job.keys:
            if key not in loaded and key in self._asked:
                self._asked[key].found = False

    def has_pending_work(self) -> bool:
        return bool(self._jobs or self._to_ask or self._asking) or not self._answers.empty()

    def take_events(self) -> Iterable[Any]:
        out, mine = [], self._events
        if mine is not None:
            out, self._events = mine, []
        return out

    def touch(self, keys: Collection[Any], req_context: Any) -> None:
        """The node sees each use itself."""

    def drain_jobs(self) -> None:
        """Waits for what has begun, which the client's deadlines bound; what has not is reported as failed."""
        for job, future in list(self._jobs.values()):
            if future.cancel():
                self._finished.put((self._result(job, list(job.keys), [False] * len(job.keys), 0.0), []))
        wait([future for _, future in self._jobs.values() if not future.cancelled()])

    def shutdown(self) -> None:
        """Ends the threads and the attachment. Idempotent."""
        self.drain_jobs()
        self._looker.shutdown()
        self._movers.shutdown()
        self._client.close()
        self._rows = np.empty((0, 0), np.uint8)  # vLLM unmaps the region next


def _rows_of(job: Any) -> list[int]:
    """The rows of a job, whose field vLLM has renamed."""
    ids = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids
    return [int(row) for row in ids]


def layout_of(spec: Any, row_bytes: int, revision: str) -> Layout:
    """The layout of rows. vLLM does not tell the tier its hash function: keys of different ones never meet."""
    config = spec.config
    parallel, cache, groups = config.parallel, config.cache, config.groups
    shape = [
        f"tp{parallel.tp_size}pp{parallel.pp_size}pcp{parallel.pcp_size}dcp{parallel.dcp_size}",
        f"world{parallel.world_size}",
        f"replicated{int(getattr(config, 'replicated_layout', False))}",
        f"canonical{int(getattr(config, 'canonical_layout', False))}",
        f"hash{cache.tokens_per_hash}x{cache.blocks_per_chunk}",
        f"block{config.worker_kv_bytes_per_block}",
    ]
    layers = "\n\n".join(f"{g.group_id} {g.tokens_per_block}\n" + "\n".join(g.layer_names) for g in groups)
    order = getattr(config, "kv_cache_layout", None) or "default"
    weights = sample_weights(str(config.model.name))
    return Layout(
        model=str(config.model.name),
        revision="+".join(filter(None, (revision, weights))),
        kv_dtype=str(config.model.dtype).removeprefix("torch."),
        attention="hybrid" if len(groups) > 1 else "gqa",
        layers=max(sum(len(g.layer_names) for g in groups), 1),
        engine_layout=f"vllm-offload/{order}/{'/'.join(shape)}/{blake3.blake3(layers.encode()).hexdigest(8)}",
        engine_epoch=_EPOCH,
        tensor_parallel=max(parallel.tp_size, 1),
        pipeline_parallel=max(parallel.pp_size, 1),
        hash_algorithm="vllm/offload-key",
        block_tokens=max(g.tokens_per_block for g in groups) * cache.blocks_per_chunk,
        parts=(Part("row", row_bytes),),
    )


def check_interface(tier: type) -> None:
    """Makes sure that the installed vLLM asks for no more than this tier has, and tells what it reads."""
    import vllm

    missing = sorted(getattr(tier, "__abstractmethods__", ()))
    if missing:
        raise IncompatibleError(
            f"vLLM {vllm.__version__} wants {', '.join(missing)} of a secondary tier; this one works with {WORKS_WITH}"
        )
    absent = [name for name in ("LookupResult", "Medium", "RequestOffloadingContext") if not hasattr(offload, name)]
    absent += [
        state for state in ("HIT", "MISS", "RETRY") if not hasattr(getattr(offload, "LookupResult", None), state)
    ]
    if absent:
        raise IncompatibleError(
            f"vLLM {vllm.__version__} has no {', '.join(absent)} for secondary tiers; this one works with {WORKS_WITH}"
        )
