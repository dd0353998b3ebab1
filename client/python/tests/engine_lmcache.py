"""kvtier.lmcache through LMCache's own plug-in loader, memory and storage manager. Run by `make test-engines`."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import Node, Nodes
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

import kvtier

SHAPE, DTYPE = torch.Size([2, 3, 64, 48]), torch.float16


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    made = Nodes()
    yield made(nvme="256MiB", ram="256MiB", flush_after="50ms")
    made.close()


def plugin(node: Node, **params: Any) -> PluginL2AdapterConfig:
    return PluginL2AdapterConfig.from_dict(
        {
            "module_path": "kvtier.lmcache",
            "class_name": "KvtierL2",
            "adapter_params": {
                "endpoint": f"unix://{node.socket}",
                "stall_timeout": 3,
                "staging_bytes": 1 << 20,
                **params,
            },
        }
    )


@pytest.fixture
def adapter(node: Node) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make(**params: Any) -> Any:
        one = create_l2_adapter(plugin(node, **params))
        made.append(one)
        one._client.wait_ready(5)
        return one

    yield make
    for one in made:
        one.close()


def keys(count: int, seed: int, **changes: Any) -> list[Any]:
    made = {"model_name": "org/model", "kv_rank": ObjectKey.ComputeKVRank(1, 0, 1, 0), **changes}
    return [ObjectKey(chunk_hash=seed.to_bytes(16, "big") + i.to_bytes(16, "big"), **made) for i in range(count)]


def memory(count: int, seed: int | None = None, dtype: torch.dtype = DTYPE) -> list[Any]:
    """LMCache's own objects over tensors; random content, or zeros."""
    generator = torch.Generator().manual_seed(seed or 0)
    out = []
    for _ in range(count):
        content = torch.zeros(SHAPE, dtype=dtype) if seed is None else torch.randn(SHAPE, generator=generator).to(dtype)
        raw = content.view(torch.uint8).flatten()
        meta = MemoryObjMetadata(
            SHAPE, dtype, 0, raw.numel(), 1, 0, MemoryFormat.KV_2LTD, shapes=[SHAPE], dtypes=[dtype]
        )
        out.append(TensorMemoryObj(raw, meta, parent_allocator=None))
    return out


DESC = {0: MemoryLayoutDesc([SHAPE], [DTYPE])}


def wait(fd: int) -> None:
    """The event of a task; consumed as LMCache's controllers do."""
    from lmcache.v1.platform.event_notifier import consume_fd

    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(20_000), "no event within 20 s"
    consume_fd(fd)


def store(one: Any, names: list[Any], objects: list[Any]) -> Any:
    task = one.submit_store_task(names, objects)
    deadline = time.monotonic() + 20
    done: dict[int, Any] = {}
    while task not in done and time.monotonic() < deadline:
        wait(one.get_store_event_fd())
        done |= one.pop_completed_store_tasks()
    return done[task]


def lookup(one: Any, names: list[Any], descs: Any = DESC) -> list[int]:
    task = one.submit_lookup_and_lock_task(names, descs)
    wait(one.get_lookup_and_lock_event_fd())
    found = one.query_lookup_and_lock_result(task)
    assert one.query_lookup_and_lock_result(task) is None, "a result is given once"
    return sorted(found.get_indices_list())


def load(one: Any, names: list[Any], objects: list[Any]) -> list[int]:
    task = one.submit_load_task(names, objects)
    wait(one.get_load_event_fd())
    return sorted(one.query_load_result(task).get_indices_list())


def same(a: list[Any], b: list[Any]) -> bool:
    return all(torch.equal(x.raw_data, y.raw_data) for x, y in zip(a, b, strict=True))


def test_objects_come_back_from_their_locks(adapter: Any) -> None:
    one = adapter()
    assert isinstance(one, L2AdapterInterface)
    assert len({one.get_store_event_fd(), one.get_lookup_and_lock_event_fd(), one.get_load_event_fd()}) == 3
    names, objects = keys(6, seed=1), memory(6, seed=1)
    assert lookup(one, names) == []
    stored = store(one, names[:5], objects[:5])
    assert (stored.is_successful(), stored.bytes_transferred()) == (True, 5 * objects[0].get_size())
    assert store(one, names[:5], objects[:5]).bytes_transferred() == 0, "what exists is success and moves nothing"
    assert lookup(one, [names[5], *names[:5]]) == [1, 2, 3, 4, 5]
    into = memory(5)
    assert not same(into, objects[:5])
    assert load(one, names[:5], into) == [0, 1, 2, 3, 4]
    assert same(into, objects[:5])
    assert one.report_status()["locked_keys"] == 5
    one.submit_unlock(names)
    assert one.report_status()["locked_keys"] == 0
    assert one.get_usage().total_bytes_used == 5 * objects[0].get_size()


def test_a_lock_keeps_an_object_and_its_end_lets_it_go(adapter: Any) -> None:
    one = adapter()
    names, objects = keys(2, seed=2), memory(2, seed=2)
    store(one, names, objects)
    assert lookup(one, names) == [0, 1]
    assert lookup(one, names[:1]) == [0], "locks are counted"
    one.delete(names)
    assert lookup(one, names) == []
    into = memory(2)
    assert load(one, names, into) == [0, 1], "locked before it was deleted"
    assert same(into, objects)
    one.submit_unlock(names)
    assert load(one, names, memory(2)) == [0]
    one.submit_unlock(names)
    assert load(one, names, memory(2)) == []
    assert one.get_usage().total_bytes_used == 0


def test_nothing_is_shared_between_models_ranks_groups_salts_and_types(adapter: Any) -> None:
    one = adapter()
    store(one, keys(1, seed=3), memory(1, seed=3))
    rank = ObjectKey.ComputeKVRank(2, 1, 2, 1)
    for change in ({"model_name": "other"}, {"kv_rank": rank}, {"object_group_id": 1}, {"cache_salt": "me"}):
        other = keys(1, seed=3, **change)
        assert lookup(one, other, {0: DESC[0], 1: DESC[0]}) == [], change
        assert load(one, other, memory(1)) == [], change
    assert lookup(one, keys(1, seed=3), {0: MemoryLayoutDesc([SHAPE], [torch.bfloat16])}) == []
    assert load(one, keys(1, seed=3), memory(1, dtype=torch.bfloat16)) == []
    assert lookup(adapter(revision="2"), keys(1, seed=3)) == []
    assert lookup(adapter(salt="x"), keys(1, seed=3)) == []
    assert lookup(one, keys(1, seed=3)) == [0]
    mixed = [*keys(1, seed=3), *keys(1, seed=3, cache_salt="me")]
    assert store(one, mixed, memory(2, seed=4)).is_successful()
    assert lookup(one, mixed) == [0, 1]


def test_locks_are_bounded(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import kvtier.lmcache as module

    monkeypatch.setattr(module, "_MOST_LOCKS", 3)
    one = adapter()
    names, objects = keys(4, seed=5), memory(4, seed=5)
    store(one, names, objects)
    assert lookup(one, names[:2]) == [0, 1]
    assert lookup(one, names[2:]) == [0, 1]
    assert one.report_status()["locked_keys"] == 3
    into = memory(4)
    assert load(one, names, into) == [0, 1, 2, 3], "the oldest lock went: its object is looked for again"
    assert same(into, objects)
    monkeypatch.setattr(module, "_MOST_TASKS", 0)
    assert not store(one, names, objects).is_successful()
    assert lookup(one, names) == []


def test_node_killed_and_restarted(adapter: Any, node: Node) -> None:
    one = adapter()
    names, objects = keys(3, seed=6), memory(3, seed=6)
    assert store(one, names, objects).is_successful()
    from test_client import eventually

    ns = next(iter(one._spaces.values()))
    one._client.demote(ns, [key.chunk_hash for key in names])
    eventually(
        "pages on disk", lambda: set(one._client.lookup(ns, [k.chunk_hash for k in names]).tiers) == {kvtier.Tier.NVME}
    )
    assert lookup(one, names) == [0, 1, 2]
    node.kill()
    assert load(one, names, memory(3)) == [], "the leases ended with the node"
    assert not store(one, keys(1, seed=7), memory(1, seed=7)).is_successful()
    assert lookup(one, names) == []
    one.submit_unlock(names)
    assert not one.report_status()["is_healthy"]
    node.start()
    one._client.wait_ready(10)
    into = memory(3)
    assert lookup(one, names) == [0, 1, 2]
    assert load(one, names, into) == [0, 1, 2]
    assert same(into, objects)


def test_storage_manager_stores_and_prefetches(node: Node) -> None:
    """LMCache's own controllers: objects leave its memory and come back from the node."""
    config = StorageManagerConfig(
        L1ManagerConfig(L1MemoryManagerConfig(64 << 20, use_lazy=False, shm_name="")),
        EvictionConfig("LRU"),
        L2AdaptersConfig([plugin(node)]),
    )
    manager = StorageManager(config)
    try:
        desc = MemoryLayoutDesc([SHAPE], [DTYPE])
        names = keys(4, seed=8)
        reserved = manager.reserve_write(names, desc)
        assert len(reserved) == 4
        want = memory(4, seed=8)
        for name, content in zip(names, want, strict=True):
            reserved[name].tensor.copy_(content.tensor)
        manager.finish_write(names)
        ((_, l2),) = manager.l2_adapters()
        deadline = time.monotonic() + 20
        while l2.get_usage().total_bytes_used < 4 * want[0].get_size():
            assert time.monotonic() < deadline, "the store controller has not stored"
            time.sleep(0.01)
        deadline = time.monotonic() + 20
        while len(manager.unsafe_read(names)) and time.monotonic() < deadline:
            manager.delete_l1_keys(names)
            if manager.get_l1_usage()[0] == 0:
                break
            time.sleep(0.01)
        assert manager.get_l1_usage()[0] == 0
        missing = keys(1, seed=9)
        spec = PrefetchTaskSpec([GroupedObjectKeys([*names, *missing], 0, desc)])
        handle = manager.submit_prefetch_task(spec)
        assert manager.wait_prefetch_status(handle, 20)
        result = manager.query_prefetch_status(handle)
        assert result is not None
        assert sorted(result.l2_hit_cells[0].get_indices_list()) == [0, 1, 2, 3]
        with manager.read_prefetched_results(names) as objects:
            assert objects is not None
            assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(objects, want, strict=True))
            want[0].tensor.neg_()
            assert not torch.equal(objects[0].tensor, want[0].tensor), "the comparison can fail"
        manager.finish_read_prefetched(names)
        assert manager.report_status()
    finally:
        manager.close()


def test_what_is_refused(adapter: Any) -> None:
    from kvtier.lmcache import check_interface

    for params, said in (({"endpoint": "tcp://x"}, "unix://"), ({"endpont": "x"}, "unknown keys")):
        with pytest.raises(kvtier.InvalidError, match=said):
            adapter(**params)
    newer = type("Newer", (), {"__abstractmethods__": frozenset({"teleport"})})
    with pytest.raises(kvtier.IncompatibleError, match=r"teleport.*works with LMCache"):
        check_interface(newer)
    one = adapter()
    one.close()
    one.close()
    assert not one._client.attached
