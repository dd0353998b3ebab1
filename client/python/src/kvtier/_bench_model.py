"""The part of the bench that needs torch and transformers: what a miss costs, and what a hit saves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from kvtier.client import Client
from kvtier.transformers import PrefixCache

_BLOCK = 128


def _model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=16384,
        initializer_range=0.2,
    )
    return transformers.LlamaForCausalLM(config).eval()


def _time(do: Callable[[], object]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def measure(client: Client, tokens: int, rounds: int) -> dict[str, float]:
    """Seconds to the first token: recompute, a miss, a hit, and the least that a hit can take."""
    model = _model()
    prefixes = PrefixCache(client, model, block_tokens=_BLOCK, salt=str(time.time_ns()).encode())
    ids = torch.randint(1, 500, (1, tokens + 1), generator=torch.Generator().manual_seed(1))

    def first_token(cache: Any) -> None:
        with torch.no_grad():
            done = cache.get_seq_length()
            model(input_ids=ids[:, done:], past_key_values=cache, use_cache=True, logits_to_keep=1)

    def recompute() -> None:
        first_token(transformers.DynamicCache())

    def helped() -> None:
        first_token(prefixes.restore(ids).cache)

    recompute()
    # In turns, so that a machine that gets slower slows both.
    pairs = [(_time(recompute), _time(helped)) for _ in range(rounds)]
    hit = prefixes.restore(ids)
    first_token(hit.cache)
    prefixes.save(ids, hit.cache)
    warm = [_time(helped) for _ in range(rounds * 3)]

    full = prefixes.restore(ids).cache
    layers = [(layer.keys, layer.values) for layer in full.layers]

    def least() -> None:
        """One copy of the bytes, and the computation of one token over them."""
        cache = transformers.DynamicCache()
        for index, (keys, values) in enumerate(layers):
            cache.update(keys, values, index)
        first_token(cache)

    floor = [_time(least) for _ in range(rounds * 3)]
    return {
        "recompute": statistics.median(a for a, _ in pairs),
        "miss_tax": statistics.median(b / a for a, b in pairs),
        "warm": statistics.median(warm),
        "floor": statistics.median(floor),
        "mib": sum(p.page_bytes for p in prefixes.layout.parts) * (tokens // _BLOCK) / 2**20,
    }
