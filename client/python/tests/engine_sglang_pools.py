"""kvtier.sglang with several pools (the v2 calls), through SGLang's own pools and hybrid controller."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import Node
from engine_sglang import PAGE, PAGES, backend, config, indices, keys, node, page_of, pool  # noqa: F401
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer, count_pool_hits
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

STATES = 12


def states(layout: str = "page_first", side: bool = False) -> Any:
    """SGLang's own pool of recurrent states, one slot a checkpoint, with random content."""
    generator = torch.Generator().manual_seed(2)
    conv = (torch.randn(2, STATES, 3, 8, generator=generator), torch.randn(2, STATES, 5, generator=generator))
    info = MambaStateBufferInfo(
        temporal=torch.randn(2, STATES, 4, 8, generator=generator),
        conv=conv,
        extra_checkpoint_buffers=(torch.randn(STATES, 7, generator=generator),) if side else (),
    )
    made = MambaPoolHost(info, 1.0, 0, device_capacity=STATES, pin_memory=False, layout=layout)
    for buffer in (made.temporal_buffer, *made.conv_buffer, *made.slot_state_buffers):
        buffer.copy_(torch.randn(buffer.shape, generator=generator).to(buffer.dtype))
    return made


def state_of(host: Any, slot: int) -> torch.Tensor:
    return host.get_data_page(slot).clone()


@pytest.fixture
def hybrid(backend: Any) -> Iterator[Any]:  # noqa: F811
    """A backend with pools beside the first, registered as SGLang's hybrid controller does."""

    def make(host: Any, pools: dict[Any, Any], **changes: Any) -> Any:
        one = backend(host, **changes)
        for name, each in {PoolName.KV: host, **pools}.items():
            one.register_mem_host_pool_v2(each, name)
        one.on_host_pools_registered()
        return one

    return make


def slots(*which: int) -> torch.Tensor:
    return torch.tensor(which)


@pytest.mark.parametrize(
    ("layout", "side"), [("page_first", False), ("page_first_direct", False), ("page_first", True)]
)
def test_states_and_windows_come_back(hybrid: Any, layout: str, side: bool) -> None:
    host, window, state = pool(layout), pool(layout), states(layout, side)
    window.kv_buffer.neg_()
    one = hybrid(host, {PoolName.SWA: window, PoolName.MAMBA: state}, model_name=f"hybrid/{layout}/{side}")
    names = keys(6, seed=20)
    stored = [
        PoolTransfer(PoolName.SWA, indices([0, 1]), keys=names[4:], hit_policy=PoolHitPolicy.TRAILING_PAGES),
        PoolTransfer(PoolName.MAMBA, slots(3), keys=names[5:], hit_policy=PoolHitPolicy.TRAILING_PAGES),
    ]
    want = [page_of(host, page) for page in range(6)], [page_of(window, page) for page in (0, 1)], state_of(state, 3)
    assert one.batch_exists_v2(names, stored).kv_hit_pages == 0
    assert one.batch_set_v1(names, indices(list(range(6)))) == [True] * 6
    assert one.batch_exists_v2(names, stored).kv_hit_pages == 0, "a prefix whose state is missing is of no use"
    assert one.batch_set_v2(stored) == {PoolName.SWA: [True, True], PoolName.MAMBA: [True]}
    found = one.batch_exists_v2(names, stored)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (6, [6])
    assert found.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.SWA: 6, PoolName.MAMBA: 6}
    loaded = [
        PoolTransfer(PoolName.SWA, indices([10, 11]), keys=names[4:]),
        PoolTransfer(PoolName.MAMBA, slots(9), keys=names[5:]),
    ]
    assert not torch.equal(state_of(state, 9), want[2])
    assert one.batch_get_v2(loaded) == {PoolName.SWA: [True, True], PoolName.MAMBA: [True]}
    assert [torch.equal(page_of(window, 10 + i), want[1][i]) for i in range(2)] == [True, True]
    assert torch.equal(state_of(state, 9), want[2])
    assert one.batch_get_v1(names, indices(list(range(12, 18)))) == [True] * 6
    assert all(torch.equal(page_of(host, 12 + i), want[0][i]) for i in range(6)), "the first pool's pages are others"


def test_every_stop_that_all_pools_can_serve(hybrid: Any) -> None:
    host, state, indexer = pool("page_first"), states(), pool("page_first", torch.bfloat16)
    one = hybrid(host, {PoolName.MAMBA: state, PoolName.INDEXER: indexer}, model_name="stops")
    names = keys(8, seed=21)
    one.batch_set_v1(names[:7], indices(list(range(7))))
    for page, slot in ((2, 0), (4, 1), (7, 2)):  # states at the ends of nodes; one lies beyond the pages
        one.batch_set_v2([PoolTransfer(PoolName.MAMBA, slots(slot), keys=[names[page]])])
    mamba = PoolTransfer(PoolName.MAMBA, keys=["-"], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    found = one.batch_exists_v2(names, [mamba])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (5, [3, 5])
    all_pages = PoolTransfer(PoolName.INDEXER, hit_policy=PoolHitPolicy.ALL_PAGES)
    assert one.batch_exists_v2(names, [mamba, all_pages]).kv_hit_pages == 0
    one.batch_set_v2([PoolTransfer(PoolName.INDEXER, indices([0, 1, 2, 3]), keys=names[:4])])
    found = one.batch_exists_v2(names, [mamba, all_pages])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [3])
    assert found.extra_pool_hit_pages == {PoolName.KV: 7, PoolName.MAMBA: 5, PoolName.INDEXER: 4}
    groups = PoolTransfer(PoolName.DRAFT, hit_policy=PoolHitPolicy.BLOCK_GROUPS)
    found = one.batch_exists_v2(names, [groups])
    assert found.kv_hit_pages == 7, "a second form of the pages does not gate them"
    assert PoolName.DRAFT not in found.extra_pool_hit_pages


def test_the_hybrid_controllers_query_and_reads(hybrid: Any) -> None:
    host, state = pool("page_first"), states()
    one = hybrid(host, {PoolName.MAMBA: state}, model_name="controller")
    ids = torch.randint(0, 50_000, (4 * PAGE,), generator=torch.Generator().manual_seed(22)).tolist()
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    names = get_storage_hash_str(ids, None, page_size=PAGE)
    one.batch_set_v1(names, indices([0, 1, 2, 3]))
    one.batch_set_v2([PoolTransfer(PoolName.MAMBA, slots(5), keys=[names[2]])])
    from sglang.srt.mem_cache.hicache_storage import PoolTransferResult

    operation = types.SimpleNamespace(
        token_ids=ids,
        last_hash=None,
        assume_stored=False,
        prefix_keys=None,
        pool_transfers=[PoolTransfer(PoolName.MAMBA, keys=["-"], hit_policy=PoolHitPolicy.TRAILING_PAGES)],
        pool_storage_result=PoolTransferResult.empty(),
    )
    self = types.SimpleNamespace(storage_backend=one, page_size=PAGE)
    assert HybridCacheController._storage_hit_query(self, operation) == (names[:3], 3 * PAGE)
    assert operation.pool_storage_result.restorable_prefix_pages == [3]
    results = one.batch_get_v2([PoolTransfer(PoolName.MAMBA, slots(7), keys=[names[2]])])
    assert count_pool_hits(results) == {PoolName.MAMBA: 1}
    assert torch.equal(state_of(state, 7), state_of(state, 5))
    want = state_of(state, 7)
    state.temporal_buffer[7].neg_()
    assert not torch.equal(state_of(state, 7), want), "the comparison can fail"
    one.batch_get_v2([PoolTransfer(PoolName.MAMBA, slots(7), keys=[names[2]])])
    assert torch.equal(state_of(state, 7), want)


def test_an_anchor_without_bytes(hybrid: Any) -> None:
    """DeepSeek V4: what a prefix needs lies in the other pools alone."""
    anchor, side = LogicalHostPool(PAGE * PAGES, PAGE, "page_first"), pool("page_first")
    one = hybrid(anchor, {PoolName.DEEPSEEK_V4_C4: side}, model_name="logical")
    names = keys(3, seed=23)
    assert one.batch_set_v1(names, indices([0, 1, 2])) == [True] * 3
    wanted = [PoolTransfer(PoolName.DEEPSEEK_V4_C4)]
    assert one.batch_exists_v2(names, wanted).kv_hit_pages == 0
    assert one.batch_set_v2([PoolTransfer(PoolName.DEEPSEEK_V4_C4, indices([0, 1]), keys=names[:2])]) == {
        PoolName.DEEPSEEK_V4_C4: [True, True]
    }
    assert one.batch_exists_v2(names, wanted).kv_hit_pages == 2
    assert one.batch_get_v1(names, indices([4, 5, 6])) == [True] * 3


def test_states_of_a_latent_model_are_each_ranks_own(hybrid: Any) -> None:
    host, state, draft = pool("page_first"), states(), pool("page_first_direct")
    first, second = (
        hybrid(
            host,
            {PoolName.MAMBA: state, PoolName.DRAFT: draft},
            model_name="k",
            is_mla_model=True,
            tp_rank=r,
            tp_size=2,
        )
        for r in (0, 1)
    )
    names = keys(2, seed=24)
    first.batch_set_v1(names, indices([0, 1]))
    assert second.batch_exists(names) == 2
    for name, where in ((PoolName.MAMBA, slots(0, 1)), (PoolName.DRAFT, indices([0, 1]))):
        first.batch_set_v2([PoolTransfer(name, where, keys=names)])
        want = [PoolTransfer(name)]
        assert first.batch_exists_v2(names, want).kv_hit_pages == 2
        assert second.batch_exists_v2(names, want).kv_hit_pages == 0
        assert second.batch_set_v2([PoolTransfer(name, where, keys=names)]) == {name: [True, True]}
        assert second.batch_exists_v2(names, want).kv_hit_pages == 2


def test_what_goes_wrong_is_a_miss(hybrid: Any, node: Node) -> None:  # noqa: F811
    host, state = pool("page_first"), states()
    one = hybrid(host, {PoolName.MAMBA: state}, model_name="wrong")
    names = keys(2, seed=25)
    assert one.batch_set_v2([PoolTransfer(PoolName.MAMBA, slots(0), keys=names)]) == {PoolName.MAMBA: [False, False]}
    assert one.batch_get_v2([PoolTransfer(PoolName.SWA, indices([0]), keys=names[:1])]) == {PoolName.SWA: [False]}
    assert one.batch_set_v2([PoolTransfer(PoolName.MAMBA, None, keys=names)]) == {PoolName.MAMBA: [False, False]}
    assert one.batch_set_v1(names, indices([0])) == [False, False]
    node.kill()
    transfer = PoolTransfer(PoolName.MAMBA, slots(0, 1), keys=names)
    assert one.batch_set_v2([transfer]) == {PoolName.MAMBA: [False, False]}
    assert one.batch_get_v2([transfer]) == {PoolName.MAMBA: [False, False]}
    assert one.batch_exists_v2(names, [transfer]).kv_hit_pages == 0
    node.start()
    one._client.wait_ready(10)
    assert one.batch_set_v2([transfer]) == {PoolName.MAMBA: [True, True]}
