"""kvtier.vllm_tier under vLLM's own spec, shared host region and tiering manager. Run by `make test-engines`.

The engine's offloading needs a GPU; everything between its host region and the tier does not.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import Node, Nodes
from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

import kvtier
import kvtier.chain

ROW, ROWS = 16 << 10, 16


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    made = Nodes()
    yield made(nvme="256MiB", ram="256MiB", flush_after="50ms")
    made.close()


def offloading(node: Node, model: str, events: bool = False, **tier: Any) -> OffloadingConfig:
    tiers = [
        {
            "type": "KvtierTier",
            "module_path": "kvtier.vllm_tier",
            "endpoint": f"unix://{node.socket}",
            "stall_timeout": 3,
            "staging_bytes": 1 << 20,
            "enable_kv_events": events,
            "locality": "LOCAL",
            **tier,
        }
    ]
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer.0", "layer.1"), 0),),
        worker_kv_bytes_per_block=ROW // 4,
        enable_kv_cache_events=events,
        extra_config={"cpu_bytes_to_use": ROW * ROWS, "secondary_tiers": tiers},
        engine_id=uuid.uuid4().hex,
        model=OffloadingModelConfig(model, "float16"),
        cache=OffloadingCacheConfig(16, 4),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
        kv_cache_layout="LBNHC",
    )


class Engine:
    """What vLLM's scheduler and its workers do with a manager, without the device."""

    def __init__(self, config: OffloadingConfig) -> None:
        TieringOffloadingSpec.build_metric_definitions(dict(config.extra_config))
        self.spec = TieringOffloadingSpec(config)
        self.manager: Any = self.spec.get_manager()
        (self.tier,) = self.manager.secondary_tiers
        self.tier._client.wait_ready(5)
        self.rows = np.asarray(self.spec._scheduler_mmap.create_kv_memoryview()).view(np.uint8)

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext([], []))

    def until(self, what: str, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not done():
            assert time.monotonic() < deadline, what
            assert self.manager.has_pending_work(), f"an idle engine would never see: {what}"
            self.step()
            time.sleep(0.002)

    def settle(self) -> None:
        self.until("no work is left", lambda: not self.manager.has_pending_work())

    def request(self, name: str) -> ReqContext:
        context = ReqContext(name)
        self.manager.on_new_request(context)
        return context

    def store(self, name: str, keys: list[Any]) -> list[np.ndarray]:
        """A request whose chunks a worker has written to the host region."""
        context = self.request(name)
        prepared = self.manager.prepare_store(keys, context)
        assert prepared is not None
        assert list(prepared.keys_to_store) == keys
        for key, row in zip(keys, prepared.store_spec.chunk_ids, strict=True):
            self.rows[row] = content(key)
        self.manager.complete_store(keys, context)
        self.settle()
        self.manager.on_request_finished(context)
        self.step()
        return [content(key) for key in keys]

    def hits(self, context: ReqContext, keys: list[Any]) -> int:
        """vLLM's lookup of a prefix: until no answer is open, the leading chunks that are in the host region."""
        seen: list[Any] = []

        def asked() -> bool:
            seen[:] = [self.manager.lookup(key, context) for key in keys]
            return not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(seen)

        deadline = time.monotonic() + 20
        while not asked():
            assert time.monotonic() < deadline, seen
            self.step()
            time.sleep(0.002)
        return next((i for i, state in enumerate(seen) if state is not LookupResult.HIT), len(seen))

    def load(self, context: ReqContext, keys: list[Any]) -> list[np.ndarray]:
        spec = self.manager.prepare_load(keys, context)
        out = [self.rows[row].copy() for row in spec.chunk_ids]
        self.manager.complete_load(keys, context)
        return out

    def forget(self) -> None:
        """Empties the host region: what comes next comes from the node."""
        self.manager.reset_cache()
        self.rows[:] = 0

    def close(self) -> None:
        del self.rows
        self.manager.shutdown()


def keys(count: int, seed: int, group: int = 0) -> list[Any]:
    return [make_offload_key(hashlib.sha256(f"{seed}/{i}".encode()).digest(), group) for i in range(count)]


def content(key: Any) -> np.ndarray:
    return np.random.default_rng(int.from_bytes(hashlib.sha256(key).digest()[:8], "big")).integers(
        0, 256, ROW, np.uint8
    )


@pytest.fixture
def engine(node: Node) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(model: str, **more: Any) -> Engine:
        made.append(Engine(offloading(node, model, **more)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_chunks_come_back_and_other_engines_find_them(engine: Any) -> None:
    one = engine("org/round")
    assert isinstance(one.tier, SecondaryTierManager)
    names = keys(6, seed=1)
    want = one.store("a", names)
    one.forget()
    context = one.request("b")
    assert one.hits(context, [*names, *keys(1, seed=99)]) == 6
    got = one.load(context, names)
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    assert not np.array_equal(got[0], want[1]), "the comparison can fail"
    one.manager.on_request_finished(context)
    one.settle()
    assert not one.tier._asked
    assert not one.tier._of_request
    other = engine("org/round")
    context = other.request("c")
    assert other.hits(context, names) == 6
    assert all(np.array_equal(a, b) for a, b in zip(other.load(context, names), want, strict=True))


def test_more_chunks_than_the_host_region_holds(engine: Any) -> None:
    one = engine("org/evict")
    chains = [keys(5, seed=10 + i) for i in range(6)]
    wants = [one.store(f"s{i}", chain) for i, chain in enumerate(chains)]
    for i, (chain, want) in enumerate(zip(chains, wants, strict=True)):
        context = one.request(f"l{i}")
        assert one.hits(context, chain) == 5
        assert all(np.array_equal(a, b) for a, b in zip(one.load(context, chain), want, strict=True))
        one.manager.on_request_finished(context)


def test_nothing_is_shared_between_models_layouts_and_salts(engine: Any, node: Node) -> None:
    one = engine("org/apart")
    names = keys(2, seed=20)
    one.store("a", names)
    for model, more in (("org/other", {}), ("org/apart", {"salt": "x"}), ("org/apart", {"revision": "2"})):
        other = engine(model, **more)
        assert other.hits(other.request("b"), names) == 0, more
    config = offloading(node, "org/apart")
    from dataclasses import replace

    for change in (
        {"kv_cache_layout": "LBHNC"},
        {"canonical_layout": True},
        {"groups": (OffloadingGroupConfig(16, ("layer.1", "layer.0"), 0),)},
        {"parallel": replace(config.parallel, tp_size=2)},
    ):
        other = Engine(replace(config, engine_id=uuid.uuid4().hex, **change))
        try:
            assert other.hits(other.request("b"), names) == 0, change
        finally:
            other.close()
    assert one.hits(one.request("c"), keys(2, seed=20, group=1)) == 0


def test_a_load_that_fails_is_a_miss_and_keeps_what_succeeded(engine: Any) -> None:
    one = engine("org/partial")
    names = keys(4, seed=30)
    one.store("a", names)
    one.forget()
    context = one.request("b")
    for key in names:
        one.manager.lookup(key, context)
    one.step()
    one.until("the answers", lambda: not one.tier._answers.empty())
    one.tier._client.drop(one.tier._namespace(), [kvtier.chain.block_name(bytes(names[2]))])
    assert one.hits(context, names) == 2
    assert one.tier.failed_jobs == 1
    assert all(np.array_equal(a, content(k)) for a, k in zip(one.load(context, names[:2]), names, strict=False))


def test_drain_waits_for_what_runs_and_fails_what_has_not_begun(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    import kvtier.vllm_tier as module

    monkeypatch.setattr(module, "_MOVERS", 1)
    one = engine("org/drain")
    go, begun, real = threading.Event(), threading.Event(), one.tier._store

    def slow(*a: Any) -> Any:
        begun.set()
        assert go.wait(20)
        return real(*a)

    monkeypatch.setattr(one.tier, "_store", slow)
    jobs = []
    for i in range(2):
        context, names = one.request(f"r{i}"), keys(1, seed=40 + i)
        one.manager.prepare_store(names, context)
        one.manager.complete_store(names, context)
        jobs.append((context, names))
    one.step()
    assert begun.wait(20)
    drained = threading.Thread(target=one.tier.drain_jobs)
    drained.start()
    drained.join(0.05)
    assert drained.is_alive(), "a copy under way is waited for"
    go.set()
    drained.join(20)
    assert not drained.is_alive()
    results = {result.job_id: result.success for result in one.tier.get_finished_jobs()}
    assert sorted(results.values()) == [False, True]


def test_events_name_what_was_stored(engine: Any) -> None:
    one = engine("org/events", events=True)
    names = keys(3, seed=50)
    one.store("a", names)
    events = [event for event in one.manager.take_events() if event.medium.value == "STORAGE"]
    assert [(event.keys, event.removed, event.locality.value) for event in events] == [(names, False, "LOCAL")]
    assert not list(one.tier.take_events())
    silent = engine("org/silent")
    silent.store("a", names)
    assert not list(silent.tier.take_events())


def test_node_killed_and_restarted(engine: Any, node: Node) -> None:
    one = engine("org/killed")
    names = keys(4, seed=60)
    one.store("a", names)
    from test_client import eventually

    ns, blocks = one.tier._namespace(), [kvtier.chain.block_name(bytes(key)) for key in names]
    one.tier._client.demote(ns, blocks)
    eventually("rows on disk", lambda: set(one.tier._client.lookup(ns, blocks).tiers) == {kvtier.Tier.NVME})
    node.kill()
    one.forget()
    assert one.hits(one.request("b"), names) == 0
    context, more = one.request("c"), keys(2, seed=61)
    one.manager.prepare_store(more, context)
    one.manager.complete_store(more, context)
    one.settle()
    assert one.tier.failed_jobs == 1
    assert one.hits(one.request("d"), more) == 2, "the host region still has them"
    node.start()
    one.tier._client.wait_ready(10)
    context = one.request("e")
    assert one.hits(context, names) == 4, "from NVMe"
    assert all(np.array_equal(a, content(k)) for a, k in zip(one.load(context, names), names, strict=True))


def test_what_is_refused(engine: Any) -> None:
    from kvtier.vllm_tier import check_interface

    for more, said in (({"endpoint": "tcp://x"}, "unix://"), ({"endpont": "x"}, "unknown keys")):
        with pytest.raises(kvtier.InvalidError, match=said):
            engine("org/refused", **more)
    newer = type("Newer", (), {"__abstractmethods__": frozenset({"teleport"})})
    with pytest.raises(kvtier.IncompatibleError, match=r"teleport.*works with vLLM"):
        check_interface(newer)
