"""kvtier.sglang through SGLang's own factory, host pools and cache controller. Run by `make test-engines`.

SGLang's engine needs a GPU; its storage interface does not.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import Node, Nodes
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_storage_hash_str

import kvtier

PAGE, PAGES, LAYERS, HEADS, DIM = 16, 24, 3, 2, 32
LAYOUTS = ("page_first", "page_first_direct", "layer_first", "page_head")


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    made = Nodes()
    yield made(nvme="256MiB", ram="512MiB", flush_after="50ms")
    made.close()


def pool(layout: str, dtype: torch.dtype = torch.float16) -> Any:
    """SGLang's own host pool for grouped-query attention, with random content."""
    device = [torch.zeros(PAGE, HEADS, DIM, dtype=dtype) for _ in range(2 * LAYERS)]
    pointers = [
        torch.tensor([t.data_ptr() for t in half], dtype=torch.uint64) for half in (device[:LAYERS], device[LAYERS:])
    ]
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=tuple(device[:LAYERS]),
            v=tuple(device[LAYERS:]),
            k_data_ptrs=pointers[0],
            v_data_ptrs=pointers[1],
            layout=KVBufferLayout.NHD,
        ),
        page_size=PAGE,
        head_num=HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    made = MHATokenToKVPoolHost(
        info,
        0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device_capacity_tokens=PAGE,
        start_layer=0,
        end_layer=LAYERS,
        host_token_capacity=PAGE * PAGES,
    )
    made.kv_buffer.copy_(torch.randn(made.kv_buffer.shape, generator=torch.Generator().manual_seed(1)).to(dtype))
    return made


def config(node: Node, zero_copy: bool, **changes: Any) -> HiCacheStorageConfig:
    extra = {
        "backend_name": "kvtier",
        "module_path": "kvtier.sglang",
        "class_name": "KvtierHiCache",
        "interface_v1": int(zero_copy),
        "endpoint": f"unix://{node.socket}",
        "stall_timeout": 3,
        "staging_bytes": 1 << 20,
        **changes.pop("extra", {}),
    }
    settings: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "org/model",
        "extra_config": extra,
    }
    return HiCacheStorageConfig(**{**settings, **changes})


@pytest.fixture
def backend(node: Node) -> Iterator[Any]:
    """Makes backends as SGLang does: by the factory, then the pool is registered."""
    made: list[Any] = []

    def make(host: Any, zero_copy: bool = True, **changes: Any) -> Any:
        one = StorageBackendFactory.create_backend("dynamic", config(node, zero_copy, **changes), host)
        made.append(one)
        one.register_mem_pool_host(host)
        one._client.wait_ready(5)
        return one

    yield make
    for one in made:
        one.close()


def keys(tokens: int, seed: int) -> list[str]:
    """SGLang's own hashes of a random prompt's pages."""
    ids = torch.randint(0, 50_000, (tokens * PAGE,), generator=torch.Generator().manual_seed(seed)).tolist()
    return get_storage_hash_str(ids, None, page_size=PAGE)


def indices(pages: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def page_of(host: Any, page: int) -> torch.Tensor:
    return host.get_data_page(page * PAGE, flat=True).clone()


def controller(one: Any, host: Any) -> Any:
    """What the controller's own transfer functions read of it."""
    return types.SimpleNamespace(storage_backend=one, storage_host_pool=host, page_size=PAGE)


def operation() -> Any:
    return types.SimpleNamespace(request_id="r", is_terminated=lambda: False)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("zero_copy", [True, False])
def test_backup_and_prefetch_as_the_controller_does(backend: Any, layout: str, zero_copy: bool) -> None:
    host = pool(layout)
    one = backend(host, zero_copy, model_name=f"round/{layout}/{zero_copy}")
    assert isinstance(one, HiCacheStorage)
    names, source, target = keys(8, seed=1), list(range(8)), list(range(12, 20))
    want = [page_of(host, page) for page in source]
    assert one.batch_exists(names) == 0
    self = controller(one, host)
    save = HiCacheController._page_set_zero_copy if zero_copy else HiCacheController._generic_page_set
    load = HiCacheController._page_get_zero_copy if zero_copy else HiCacheController._generic_page_get
    assert save(self, names, indices(source)) is True
    assert one.batch_exists(names) == 8
    assert one.batch_exists(names[:5]) == 5
    assert load(self, operation(), names, indices(target)) == 8
    for page, content in zip(target, want, strict=True):
        assert torch.equal(page_of(host, page), content)
    other = keys(3, seed=2)
    assert one.batch_exists(other + names) == 0
    assert load(self, operation(), [*names[:2], *other], indices(target[:5])) == 2, "up to the first that is not there"


@pytest.mark.parametrize("zero_copy", [True, False])
def test_the_controllers_hit_query(backend: Any, zero_copy: bool) -> None:
    host = pool("page_first")
    one = backend(host, zero_copy, model_name=f"query/{zero_copy}")
    ids = torch.randint(0, 50_000, (10 * PAGE,), generator=torch.Generator().manual_seed(3)).tolist()
    names = get_storage_hash_str(ids, None, page_size=PAGE)
    self = controller(one, host)
    (HiCacheController._page_set_zero_copy if zero_copy else HiCacheController._generic_page_set)(
        self, names[:6], indices(list(range(6)))
    )
    query = types.SimpleNamespace(last_hash=None, token_ids=ids, prefix_keys=None)
    assert HiCacheController._storage_hit_query(self, query) == (names[:6], 6 * PAGE)


def test_single_keys(backend: Any) -> None:
    host = pool("page_first")
    one = backend(host, zero_copy=False, model_name="single")
    (name,) = keys(1, seed=4)
    value = page_of(host, 0)
    assert one.get(name) is None
    assert not one.exists(name)
    assert one.set(name, value)
    assert one.set(name, value), "what exists is success"
    assert one.exists(name)
    assert torch.equal(one.get(name), value)
    into = torch.zeros_like(value)
    assert one.get(name, into) is into
    assert torch.equal(into, value)
    assert one.get(name, torch.zeros(3)) is None, "a place of the wrong size is a miss"
    assert not one.set(name + "x", value[:-1]), "and so is a page"
    assert not one.batch_set([name], None)
    assert one.set("a key of another form", value)
    assert torch.equal(one.get("a key of another form"), value)


def test_nothing_is_shared_between_models_types_layouts_and_ranks(backend: Any) -> None:
    host = pool("page_first")
    names = keys(4, seed=5)
    one = backend(host, model_name="apart")
    assert all(one.batch_set_v1(names, indices([0, 1, 2, 3])))
    others = {
        "model": backend(host, model_name="apart-2"),
        "rank": backend(host, model_name="apart", tp_rank=1, tp_size=2),
        "size": backend(host, model_name="apart", tp_size=2),
        "stage": backend(host, model_name="apart", pp_size=2),
        "layout": backend(pool("page_first_direct"), model_name="apart"),
        "type": backend(pool("page_first", torch.bfloat16), model_name="apart"),
        "salt": backend(host, model_name="apart", extra={"salt": "x"}),
        "revision": backend(host, model_name="apart", extra={"revision": "2"}),
        "interface": backend(host, zero_copy=False, model_name="apart"),
    }
    for what, other in others.items():
        assert other.batch_exists(names) == 0, what
        if what not in ("layout", "type"):
            continue
        assert other.batch_get_v1(names, indices([0, 1, 2, 3])) == [False] * 4, what
    assert backend(host, model_name="apart").batch_exists(names) == 4


def test_latent_pages_are_written_by_one_rank(backend: Any) -> None:
    host = pool("page_first")
    names = keys(2, seed=6)
    first, second = (backend(host, model_name="latent", is_mla_model=True, tp_rank=r, tp_size=2) for r in (0, 1))
    assert second.batch_set_v1(names, indices([0, 1])) == [True, True]
    assert second.batch_exists(names) == 0, "rank 1 leaves the writing to rank 0"
    assert first.batch_set_v1(names, indices([0, 1])) == [True, True]
    assert second.batch_exists(names) == 2


def test_a_damaged_page_would_be_seen(backend: Any) -> None:
    """The control: the comparison of pages can fail."""
    host = pool("page_first")
    one = backend(host, model_name="damaged")
    names, want = keys(1, seed=7), page_of(host, 0)
    host.kv_buffer[0, 3].neg_()
    one.batch_set_v1(names, indices([0]))
    assert one.batch_get_v1(names, indices([5])) == [True]
    assert not torch.equal(page_of(host, 5), want)


def test_node_killed_restarted_and_absent(backend: Any, node: Node) -> None:
    host = pool("page_first")
    one = backend(host, model_name="killed")
    names, want = keys(4, seed=8), [page_of(host, page) for page in range(4)]
    assert one.batch_set_v1(names, indices([0, 1, 2, 3])) == [True] * 4
    one._client.demote(one._namespace(), [bytes.fromhex(name) for name in names])
    from test_client import eventually

    def on_disk() -> bool:
        found = one._client.lookup(one._namespace(), [bytes.fromhex(name) for name in names])
        return set(found.tiers) == {kvtier.Tier.NVME}

    eventually("pages on disk", on_disk)
    node.kill()
    assert one.batch_exists(names) == 0
    assert one.batch_get_v1(names, indices([4, 5, 6, 7])) == [False] * 4
    assert one.batch_set_v1(names, indices([0, 1, 2, 3])) == [False] * 4
    assert one.batch_get(names) == [None] * 4
    assert not one.batch_set(names, want)
    node.start()
    one._client.wait_ready(10)
    assert one.batch_get_v1(names, indices([4, 5, 6, 7])) == [True] * 4
    for page, content in enumerate(want):
        assert torch.equal(page_of(host, 4 + page), content)


def test_what_is_refused(backend: Any) -> None:
    from kvtier.sglang import check_interface

    host = pool("page_first")
    for changes, said in (
        ({"model_name": None}, "model name"),
        ({"extra": {"endpoint": "tcp://x"}}, "unix://"),
        ({"extra": {"endpont": "x"}}, "unknown keys"),
    ):
        with pytest.raises(kvtier.InvalidError, match=said):
            backend(host, **changes)
    with pytest.raises(kvtier.IncompatibleError, match="layout"):
        backend(types.SimpleNamespace(layout="spiral"))
    newer = type("Newer", (), {"__abstractmethods__": frozenset({"teleport"})})
    with pytest.raises(kvtier.IncompatibleError, match=r"teleport.*works with SGLang"):
        check_interface(newer)
