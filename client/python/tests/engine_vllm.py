"""kvtier.vllm in a real vLLM engine on CPU. Run by `make test-engines`; needs vLLM.

The oracle is transformers with the same checkpoint: in fp32 both say the same tokens.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_models as models
import numpy as np
import pytest
import torch
from conftest import Node, Nodes, patient
from engine_vllm_child import BLOCK, engine, generate
from test_client import eventually

import kvtier
from kvtier import _vllm_layout

HERE = Path(__file__).parent
NEW = 16


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    made = Nodes()
    yield made(nvme="512MiB", ram="512MiB", flush_after="50ms")
    made.close()


@pytest.fixture(scope="module")
def model() -> Any:
    return models.make("gqa")


def checkpoint(at: Path, model: Any) -> str:
    model.save_pretrained(at)
    return str(at)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, model: Any) -> str:
    return checkpoint(tmp_path_factory.mktemp("gqa"), model)


@pytest.fixture(scope="module")
def llm(node: Node, weights: str) -> Iterator[Any]:
    """Forty blocks: four requests of 250 tokens that generate do not fit."""
    made = engine(weights, node.socket, num_gpu_blocks_override=40, max_model_len=1088)
    yield made
    made.llm_engine.engine_core.shutdown()


def scheduler(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def ours(llm: Any) -> Any:
    """The connector's scheduler side."""
    return scheduler(llm).connector._scheduler


def prompt(tokens: int, seed: int) -> list[int]:
    return models.prompt(tokens, seed=seed)[0].tolist()


def oracle(model: Any, ids: list[int], new: int = NEW) -> list[int]:
    return models.greedy(model, torch.tensor([ids]), new)[0, len(ids) :].tolist()


def fresh(llm: Any) -> None:
    """vLLM's own cache forgets: what is hit from now on comes from kvtier."""
    assert llm.reset_prefix_cache()


def stored(llm: Any, node: Node, ids: list[int]) -> None:
    """Waits until the prompt's full blocks are committed, which happens after vLLM has answered."""
    with patient(node, staging_bytes=1 << 20) as client:
        ns, names = namespace(llm, client), names_of(llm, ids)
        eventually("commit", lambda: not names or client.lookup(ns, names).usable_blocks == len(names))


def namespace(llm: Any, client: kvtier.Client) -> kvtier.Namespace:
    return client.register(ours(llm)._layout)


def names_of(llm: Any, ids: list[int]) -> list[bytes]:
    """The names by vLLM's own hash function."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    hash_fn = get_hash_fn_by_name(llm.llm_engine.vllm_config.cache_config.prefix_caching_hash_algo)
    parent, out = kv_cache_utils.NONE_HASH, []
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        parent = kv_cache_utils.hash_block_tokens(hash_fn, parent, ids[start : start + BLOCK], None)
        out.append(bytes(parent))
    return out


@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 100, 333, 1000])
def test_same_tokens_cold_and_warm(llm: Any, node: Node, model: Any, tokens: int) -> None:
    ids = prompt(tokens, seed=tokens)
    want = oracle(model, ids)
    fresh(llm)
    assert generate(llm, [ids]) == [(want, 0)]
    stored(llm, node, ids)
    fresh(llm)
    assert generate(llm, [ids]) == [(want, (tokens - 1) // BLOCK * BLOCK)]


def test_many_at_once_with_shared_prefixes(llm: Any, node: Node, model: Any) -> None:
    trunk = prompt(150, seed=5000)
    prompts = [trunk[:shared] + prompt(60, seed=5001 + i) for i, shared in enumerate((1, 32, 40, 96, 150, 150))]
    want = [oracle(model, ids) for ids in prompts]
    for _ in range(2):
        fresh(llm)
        got = generate(llm, prompts)
        assert [tokens for tokens, _ in got] == want
        for ids in prompts:
            stored(llm, node, ids)
    assert [hit for _, hit in got] == [(len(ids) - 1) // BLOCK * BLOCK for ids in prompts]


def test_a_second_turn_hits_the_answer_of_the_first(llm: Any, node: Node, model: Any) -> None:
    ids = prompt(50, seed=5500)
    fresh(llm)
    ((answer, _),) = generate(llm, [ids], new=80)
    turn = ids + answer + prompt(20, seed=5501)
    stored(llm, node, (ids + answer)[:128])
    fresh(llm)
    assert generate(llm, [turn]) == [(oracle(model, turn), 128)]


def test_preemption(llm: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [prompt(250, seed=6000 + i) for i in range(4)]
    want = [oracle(model, ids, 100) for ids in prompts]
    preempted = []
    real = scheduler(llm)._preempt_request
    monkeypatch.setattr(scheduler(llm), "_preempt_request", lambda *a, **k: (preempted.append(1), real(*a, **k))[1])
    for _ in range(2):
        fresh(llm)
        assert [tokens for tokens, _ in generate(llm, prompts, new=100)] == want
    assert preempted, "the test is to make requests wait for blocks"


def test_a_load_that_fails_is_recomputed(llm: Any, node: Node, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(200, seed=7000)
    want = oracle(model, ids)
    fresh(llm)
    generate(llm, [ids])
    stored(llm, node, ids)
    fresh(llm)
    spoiled = []
    real = ours(llm).jobs

    def jobs(output: Any) -> Any:
        loads, saves = real(output)
        for load in loads:
            load.token = bytes(16)
            spoiled.append(load.request)
        return loads, saves

    monkeypatch.setattr(ours(llm), "jobs", jobs)
    assert generate(llm, [ids])[0][0] == want
    assert spoiled, "the load was tried"
    monkeypatch.undo()
    fresh(llm)
    assert generate(llm, [ids]) == [(want, 192)]
    assert not ours(llm)._decisions, "no lease is left"


def test_a_damaged_page_changes_the_tokens(llm: Any, node: Node, model: Any) -> None:
    """The control of the tests above: if wrong pages gave the same tokens, they would prove nothing."""
    ids = prompt(100, seed=8000)
    want = oracle(model, ids)
    fresh(llm)
    assert generate(llm, [ids]) == [(want, 0)]
    stored(llm, node, ids)
    with patient(node) as client:
        ns, names = namespace(llm, client), names_of(llm, ids)
        with client.fetch(ns, names) as lease:
            pages = [lease.page(row).view(np.float32).copy() for row in range(3)]
        client.drop(ns, names)
        eventually("drop", lambda: client.lookup(ns, names).usable_blocks == 0)

        def fill(block: int, part: int, page: np.ndarray) -> None:
            page[:] = (-pages[block]).view(np.uint8)

        client.write(ns, names, fill)
    fresh(llm)
    ((got, hit),) = generate(llm, [ids])
    assert hit == 96
    assert got != want


def test_node_killed_and_restarted(llm: Any, node: Node, model: Any) -> None:
    ids, other = prompt(300, seed=9000), prompt(300, seed=9001)
    want = oracle(model, ids)
    fresh(llm)
    generate(llm, [ids])
    stored(llm, node, ids)
    with patient(node, staging_bytes=1 << 20) as client:
        ns, names = namespace(llm, client), names_of(llm, ids)
        client.demote(ns, names)
        eventually("pages on disk", lambda: set(client.lookup(ns, names).tiers) == {kvtier.Tier.NVME})
    fresh(llm)
    assert generate(llm, [ids]) == [(want, 288)], "from NVMe: the decision is made by another thread"
    node.kill()
    fresh(llm)
    assert generate(llm, [ids]) == [(want, 0)], "without the node the engine goes on"
    assert generate(llm, [other])[0][0] == oracle(model, other)
    node.start()
    ours(llm)._client.wait_ready(10)

    def hits() -> bool:  # the worker attaches by itself too
        fresh(llm)
        ((got, hit),) = generate(llm, [ids])
        assert got == want
        return hit == 288

    eventually("hits from NVMe after the restart", hits, 60)


def child(weights: str, socket: str, prompts: list[list[int]], **options: Any) -> list[list[list[Any]]]:
    """Two rounds of the prompts in an engine of another process."""
    args = [
        sys.executable,
        str(HERE / "engine_vllm_child.py"),
        weights,
        socket,
        json.dumps({"prompts": prompts, **options}),
    ]
    done = subprocess.run(args, capture_output=True, text=True, timeout=900)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return json.loads(lines[0].removeprefix("RESULT "))


def test_a_cold_engine_finds_what_another_stored(llm: Any, node: Node, model: Any, weights: str) -> None:
    ids = prompt(200, seed=9500)
    fresh(llm)
    generate(llm, [ids])
    stored(llm, node, ids)
    first, _ = child(weights, node.socket, [ids])
    assert first == [[oracle(model, ids), 192]]


def test_sliding_window(node: Node, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = models.mistral().eval()
    prompts = [prompt(tokens, seed=9600 + tokens) for tokens in (40, 200, 333)]
    cold, warm = child(checkpoint(tmp_path, model), node.socket, prompts)
    want = [oracle(model, ids) for ids in prompts]
    assert [tokens for tokens, _ in cold] == want
    assert [tokens for tokens, _ in warm] == want
    assert [hit for _, hit in warm] == [(len(ids) - 1) // BLOCK * BLOCK for ids in prompts]


def test_two_ranks(node: Node, model: Any, weights: str) -> None:
    prompts = [prompt(tokens, seed=9700 + tokens) for tokens in (40, 200)]
    cold, warm = child(weights, node.socket, prompts, tensor_parallel_size=2)
    want = [oracle(model, ids) for ids in prompts]
    assert [tokens for tokens, _ in cold] == want
    assert [tokens for tokens, _ in warm] == want
    assert [hit for _, hit in cold] == [0, 0], "pages of one rank are no pages of two"
    assert [hit for _, hit in warm] == [32, 192]


class TestConfiguration:
    """What is refused, on copies of the real configuration."""

    def config(self, llm: Any, **changes: Any) -> Any:
        made = copy.copy(llm.llm_engine.vllm_config)
        for path, value in changes.items():
            part, _, name = path.partition("__")
            inner = copy.copy(getattr(made, part))
            object.__setattr__(inner, name, value)
            object.__setattr__(made, part, inner)
        return made

    def test_layouts_differ(self, llm: Any) -> None:
        caches = scheduler(llm).kv_cache_config
        same = _vllm_layout.layout(self.config(llm), caches)
        assert same == ours(llm)._layout
        for changes in (
            {"model_config__dtype": torch.bfloat16},
            {"model_config__revision": "2"},
            {"model_config__quantization": "fp8"},
            {"cache_config__cache_dtype": "fp8"},
            {"cache_config__prefix_caching_hash_algo": "sha256_cbor"},
            {"parallel_config__tensor_parallel_size": 2},
        ):
            assert _vllm_layout.layout(self.config(llm, **changes), caches) != same, changes

    def test_other_weights_of_one_name_differ(self, llm: Any, tmp_path: Path) -> None:
        caches, seen = scheduler(llm).kv_cache_config, set()
        for seed in (1, 2):
            at = checkpoint(tmp_path / "model", models.make("gqa", seed=seed))
            seen.add(_vllm_layout.layout(self.config(llm, model_config__model=at), caches).revision)
        assert len(seen) == 2

    def test_refusals(self, llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        caches = scheduler(llm).kv_cache_config
        for changes, said in (
            ({"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size"),
            ({"cache_config__prefix_caching_hash_algo": "xxhash_cbor"}, "PYTHONHASHSEED"),
        ):
            with pytest.raises(kvtier.IncompatibleError, match=said):
                _vllm_layout.layout(self.config(llm, **changes), caches)
        monkeypatch.setenv("PYTHONHASHSEED", "0")
        assert _vllm_layout.layout(self.config(llm, cache_config__prefix_caching_hash_algo="xxhash_cbor"), caches)
        wrong = copy.copy(caches)
        object.__setattr__(wrong, "kv_cache_layout", "BHLNC")
        with pytest.raises(kvtier.IncompatibleError, match="BHLNC"):
            _vllm_layout.groups(self.config(llm), wrong)
        for extra, said in (
            ({"kvtier.endpoint": "tcp://x:1"}, "unix://"),
            ({"kvtier.endpint": "unix:///x"}, "unknown keys"),
        ):
            config = self.config(llm, kv_transfer_config__kv_connector_extra_config=extra)
            with pytest.raises(kvtier.InvalidError, match=said):
                _vllm_layout.Settings.of(config)

    def test_failure_policy_and_interface(self, llm: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        from kvtier.vllm import KvtierConnector, check_interface

        config = self.config(llm, kv_transfer_config__kv_load_failure_policy="fail")
        with pytest.raises(kvtier.IncompatibleError, match="recompute"):
            KvtierConnector(config, KVConnectorRole.SCHEDULER, scheduler(llm).kv_cache_config)
        check_interface(KvtierConnector)
        newer = type("Newer", (), {"__abstractmethods__": frozenset({"teleport_kv"})})
        with pytest.raises(kvtier.IncompatibleError, match=r"teleport_kv.*works with vLLM"):
            check_interface(newer)

    def test_tensors_of_another_layout_are_refused(self, llm: Any) -> None:
        from kvtier._vllm_worker import _rows

        good = torch.zeros(4, 2, 32, 64)
        assert _rows("l", {"l": good}, 2 * 32 * 64 * 4).shape == (4, 2 * 32 * 64 * 4)
        strided = torch.zeros(4, 3, 2 * 32 * 64)[:, 1, :].view(4, 2, 32, 64)
        rows = _rows("l", {"l": strided}, 2 * 32 * 64 * 4)
        rows[2].fill_(7)
        assert strided[2].view(torch.uint8).eq(7).all(), "strided blocks are written in place"
        assert not strided[1].any()
        with pytest.raises(kvtier.IncompatibleError, match="unknown KV cache layout"):
            _rows("l", {"l": good.transpose(1, 2)}, 2 * 32 * 64 * 4)
        with pytest.raises(kvtier.IncompatibleError, match="its group says"):
            _rows("l", {"l": good}, 100)
        with pytest.raises(kvtier.IncompatibleError, match="no KV cache"):
            _rows("m", {"l": good}, 100)
