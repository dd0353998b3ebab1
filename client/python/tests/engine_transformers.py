"""kvtier.transformers with real models. Run by `make test-engines`; needs torch and transformers."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import engine_models as models
import numpy as np
import pytest
import torch
from conftest import Node, Nodes, patient
from test_client import eventually

import kvtier
from kvtier.transformers import PrefixCache

BLOCK = 16


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    made = Nodes()
    yield made(nvme="512MiB", ram="512MiB")
    made.close()


@pytest.fixture(scope="module", params=list(models.MODELS))
def model(request: pytest.FixtureRequest) -> Any:
    return models.make(request.param)


@pytest.fixture
def client(node: Node) -> Iterator[kvtier.Client]:
    with patient(node) as made:
        yield made


def same(model: Any, prefixes: PrefixCache, ids: torch.Tensor, hit_tokens: int | None = None) -> None:
    """Greedy tokens with the cache are those without."""
    before = prefixes.stats.restored_tokens
    assert torch.equal(prefixes.generate(ids, **models.options()), models.greedy(model, ids))
    if hit_tokens is not None:
        assert prefixes.stats.restored_tokens - before == hit_tokens * ids.shape[0]


def test_tokens_are_the_same_for_prompts_of_many_shapes(model: Any, client: kvtier.Client) -> None:
    prefixes = PrefixCache(client, model, block_tokens=BLOCK)
    for tokens in (1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 1, 100, 333):
        ids = models.prompt(tokens, seed=tokens)
        same(model, prefixes, ids, hit_tokens=0)
        same(model, prefixes, ids, hit_tokens=(tokens - 1) // BLOCK * BLOCK)
    assert prefixes.stats.failed_restores == prefixes.stats.failed_saves == 0, prefixes.stats


def test_shared_prefixes_that_diverge(model: Any, client: kvtier.Client) -> None:
    prefixes = PrefixCache(client, model, block_tokens=BLOCK)
    trunk = models.prompt(90, seed=1000)
    same(model, prefixes, trunk)
    for i, shared in enumerate((1, 16, 17, 48, 90)):
        ids = torch.cat([trunk[:, :shared], models.prompt(40, seed=2000 + i)], dim=1)
        same(model, prefixes, ids, hit_tokens=min(shared // BLOCK * BLOCK, 80))


def test_a_second_turn_reuses_the_answer_of_the_first(model: Any, client: kvtier.Client) -> None:
    prefixes = PrefixCache(client, model, block_tokens=BLOCK)
    turn = prefixes.generate(models.prompt(50, seed=3000), **models.options())
    ids = torch.cat([turn, models.prompt(20, seed=3001)], dim=1)
    same(model, prefixes, ids, hit_tokens=(turn.shape[1] - 1) // BLOCK * BLOCK)


def test_batches(model: Any, client: kvtier.Client) -> None:
    prefixes = PrefixCache(client, model, block_tokens=BLOCK)
    ids = models.prompt(70, seed=4000, rows=3)
    same(model, prefixes, ids, hit_tokens=0)
    same(model, prefixes, ids, hit_tokens=64)
    mixed = torch.cat([ids[:2], models.prompt(70, seed=4001)], dim=0)
    same(model, prefixes, mixed, hit_tokens=0)
    longer = torch.cat([ids[:, :40], models.prompt(30, seed=4002, rows=3)], dim=1)
    longer[0] = ids[0]
    same(model, prefixes, longer, hit_tokens=32)


def test_four_thousand_tokens(client: kvtier.Client) -> None:
    model = models.make("gqa")
    prefixes = PrefixCache(client, model, block_tokens=128)
    ids = models.prompt(4096, seed=5000)
    same(model, prefixes, ids, hit_tokens=0)
    same(model, prefixes, ids, hit_tokens=31 * 128)


def test_another_process_finds_it(node: Node, client: kvtier.Client) -> None:
    import subprocess
    from pathlib import Path

    model = models.make("gqa", seed=7)
    prefixes = PrefixCache(client, model, block_tokens=BLOCK)
    ids = models.prompt(100, seed=6000)
    out = prefixes.generate(ids, **models.options())
    script = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import engine_models as models, kvtier
from kvtier.transformers import PrefixCache
with kvtier.Client({node.socket!r}, stall_timeout=3, staging_bytes=1 << 20) as client:
    prefixes = PrefixCache(client, models.make("gqa", seed=7), block_tokens={BLOCK})
    out = prefixes.generate(models.prompt(100, seed=6000), **models.options())
    print(prefixes.stats.restored_tokens, out[0].tolist())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == f"96 {out[0].tolist()}"


def test_a_damaged_page_changes_the_tokens(model: Any, client: kvtier.Client) -> None:
    """The control of all tests above: if wrong pages gave the same tokens, they would prove nothing."""
    prefixes = PrefixCache(client, model, block_tokens=BLOCK, salt=b"damaged")
    ids = models.prompt(64 + 5, seed=8000)
    want = models.greedy(model, ids)
    hit = prefixes.restore(ids)
    model(input_ids=ids[:, :64], past_key_values=hit.cache, use_cache=True)
    for layer in hit.cache.layers:
        layer.keys.neg_()
    assert prefixes.save(ids[:, :64], hit.cache) == 4, "the page's checksum is right, its content is not"
    before = prefixes.stats.restored_tokens
    got = prefixes.generate(ids, **models.options())
    assert prefixes.stats.restored_tokens - before == 64
    assert not torch.equal(got, want)


def test_nothing_is_shared_with_another_model_type_salt_or_shape(client: kvtier.Client) -> None:
    model = models.make("gqa", seed=20)
    ids = models.prompt(100, seed=9000)
    PrefixCache(client, model, block_tokens=BLOCK).generate(ids, **models.options())
    scaled = models.make("gqa", seed=20)
    with torch.no_grad():
        scaled.model.layers[2].self_attn.v_proj.weight.mul_(1.001)
    rope = models.llama(rope_parameters={"rope_type": "default", "rope_theta": 77777.0})
    rope.load_state_dict(model.state_dict())
    others = {
        "other weights": PrefixCache(client, models.make("gqa", seed=21), block_tokens=BLOCK),
        "one weight differs": PrefixCache(client, scaled, block_tokens=BLOCK),
        "other rope": PrefixCache(client, rope.eval(), block_tokens=BLOCK),
        "other dtype": PrefixCache(client, models.make("gqa", seed=20).to(torch.bfloat16), block_tokens=BLOCK),
        "salt": PrefixCache(client, model, block_tokens=BLOCK, salt=b"tenant of an application"),
        "seed": PrefixCache(client, model, block_tokens=BLOCK, seed="other"),
        "block": PrefixCache(client, model, block_tokens=2 * BLOCK),
        "revision": PrefixCache(client, model, block_tokens=BLOCK, revision="2"),
    }
    for what, prefixes in others.items():
        hit = prefixes.restore(ids)
        assert (hit.tokens, hit.why) == (0, ""), what
    assert PrefixCache(client, models.make("gqa", seed=20), block_tokens=BLOCK).restore(ids).tokens == 96


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_pages_come_back_bit_by_bit(client: kvtier.Client, dtype: torch.dtype) -> None:
    model = models.make("gqa").to(dtype)
    prefixes = PrefixCache(client, model, block_tokens=BLOCK)
    ids = models.prompt(65, seed=9500)
    first = prefixes.restore(ids)
    model(input_ids=ids[:, :64], past_key_values=first.cache, use_cache=True)
    prefixes.save(ids[:, :64], first.cache)
    again = prefixes.restore(ids)
    assert again.tokens == 64
    for have, want in zip(again.cache.layers, first.cache.layers, strict=True):
        assert torch.equal(have.keys, want.keys)
        assert torch.equal(have.values, want.values)


def test_window_pages_that_are_not_needed_may_be_missing(client: kvtier.Client) -> None:
    model = models.make("hybrid", seed=30)
    prefixes = PrefixCache(client, model, block_tokens=BLOCK)
    assert [(p.name, p.last_blocks) for p in prefixes.layout.parts] == [("full", 0), ("window-40", 3)]
    ids = models.prompt(161, seed=9600)
    hit = prefixes.restore(ids)
    model(input_ids=ids[:, :160], past_key_values=hit.cache, use_cache=True)
    ns, names = prefixes._namespace(), prefixes.names(ids[0].tolist())

    def fill(block: int, part: int, page: np.ndarray) -> None:
        into = torch.from_numpy(page).view(torch.float32)
        for layer, have in zip(prefixes._shape.layers, hit.cache.layers, strict=True):
            if layer.part == part:
                prefixes._fill(layer, have, 0, block_of(part, block) * BLOCK, into)

    def block_of(part: int, block: int) -> int:
        return block + 7 if part == 1 else block

    # All pages of the full layers; of the windows only the last three.
    client.write(ns, names, fill, parts=0b01)
    client.write(ns, names[7:], fill, first=7, parts=0b10)
    same(model, prefixes, ids, hit_tokens=160)


def test_a_load_that_fails_is_recomputed(client: kvtier.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.make("gqa", seed=40)
    prefixes = PrefixCache(client, model, block_tokens=BLOCK)
    ids = models.prompt(100, seed=9700)
    same(model, prefixes, ids)

    def lost(self: kvtier.Lease) -> None:
        raise kvtier.LostError("a slot was reused")

    monkeypatch.setattr(kvtier.Lease, "check", lost)
    same(model, prefixes, ids, hit_tokens=0)
    assert prefixes.stats.failed_restores == 1
    monkeypatch.undo()
    same(model, prefixes, ids, hit_tokens=96)
    eventually("no lease is left", lambda: not client._keeper.link.leases)


def test_node_killed_restarted_and_absent(nodes: Nodes) -> None:
    node = nodes(nvme="256MiB", flush_after="50ms")
    model = models.make("gqa", seed=50)
    ids = models.prompt(200, seed=9800)
    want = models.greedy(model, ids)
    with patient(node) as client:
        prefixes = PrefixCache(client, model, block_tokens=BLOCK)
        assert torch.equal(prefixes.generate(ids, **models.options()), want)
        ns, names = prefixes._namespace(), prefixes.names(ids[0].tolist())
        client.demote(ns, names)
        eventually("pages on disk", lambda: set(client.lookup(ns, names).tiers) == {kvtier.Tier.NVME})
        assert torch.equal(prefixes.generate(ids, **models.options()), want)
        node.kill()
        # In the middle of a run: the engine goes on, with the same tokens.
        assert torch.equal(prefixes.generate(ids, **models.options()), want)
        eventually("loss", lambda: not client.attached)
        began = time.monotonic()
        hit = prefixes.restore(ids)
        assert (hit.tokens, time.monotonic() - began < 0.1) == (0, True)
        assert "kvtier serve" in hit.why or "ended" in hit.why or "lost" in hit.why, hit.why
        assert torch.equal(prefixes.generate(ids, **models.options()), want)
        node.start()
        client.wait_ready(5)
        hit = prefixes.restore(ids)
        assert hit.tokens == 192
        assert set(hit.tiers) == {kvtier.Tier.NVME}
        assert torch.equal(prefixes.generate(ids, **models.options()), want)
    with kvtier.Client(str(node.directory / "nobody.sock")) as client:
        prefixes = PrefixCache(client, model, block_tokens=BLOCK)
        assert torch.equal(prefixes.generate(ids, **models.options()), want), "made without a node"


def test_killed_while_generating(nodes: Nodes) -> None:
    node = nodes(nvme="256MiB")
    model = models.make("gqa", seed=60)
    ids = models.prompt(120, seed=9900)
    want = models.greedy(model, ids)
    with patient(node) as client:
        prefixes = PrefixCache(client, model, block_tokens=BLOCK)
        prefixes.generate(ids, **models.options())

        class Kill(torch.nn.Module):
            calls = 0

        def kill(*_: Any) -> None:
            Kill.calls += 1
            if Kill.calls == 5:
                node.kill()

        handle = model.model.layers[1].register_forward_hook(kill)
        try:
            assert torch.equal(prefixes.generate(ids, **models.options()), want)
        finally:
            handle.remove()
        assert Kill.calls > 5


def test_bad_input(client: kvtier.Client) -> None:
    model = models.make("gqa")
    prefixes = PrefixCache(client, model, block_tokens=BLOCK)
    with pytest.raises(kvtier.InvalidError, match="batch"):
        prefixes.restore(torch.zeros(5, dtype=torch.long))
    from transformers import DynamicCache

    other = models.make("mla")
    cache = DynamicCache()
    other(input_ids=models.prompt(40), past_key_values=cache, use_cache=True)
    with pytest.raises(kvtier.InvalidError, match="layers"):
        prefixes.save(models.prompt(40), cache)
    window = models.make("window")
    truncated = DynamicCache(config=window.config)
    window(input_ids=models.prompt(40), past_key_values=truncated, use_cache=True)
    with pytest.raises(kvtier.InvalidError, match="restore"):
        PrefixCache(client, window, block_tokens=BLOCK).save(models.prompt(40), truncated)
    with pytest.raises(kvtier.InvalidError):
        PrefixCache(client, model, block_tokens=0)


def test_models_with_other_state_are_refused(client: kvtier.Client) -> None:
    import transformers as hf

    config = hf.Qwen3NextConfig(
        **models.COMMON,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        head_dim=16,
        num_key_value_heads=2,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )
    with pytest.raises(kvtier.IncompatibleError, match="keeps a"):
        PrefixCache(client, hf.Qwen3NextForCausalLM(config).eval(), block_tokens=BLOCK)


def test_an_interface_that_is_not_there_is_named(client: kvtier.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import cache_utils

    monkeypatch.delattr(cache_utils, "DynamicSlidingWindowLayer")
    with pytest.raises(kvtier.IncompatibleError, match="works with transformers"):
        PrefixCache(client, models.make("gqa"), block_tokens=BLOCK)
