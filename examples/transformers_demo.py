"""Time to first token of one long prompt through transformers: cold, warm from RAM, warm from NVMe after a restart.

    make demo-engine

It starts a node of its own, and uses a small model with random weights. Each time stands beside a recompute
measured in the same run; the tokens must be those that the model says without a cache.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import kvtier
from kvtier.transformers import PrefixCache

BLOCK = 128


class Node:
    """A daemon that lives as long as the demo."""

    def __init__(self, binary: str, directory: Path) -> None:
        self.socket = str(directory / "k.sock")
        self._args = [
            binary,
            "serve",
            f"--socket={self.socket}",
            f"--dir={directory / 'data'}",
            "--ram=1GiB",
            "--nvme=1GiB",
            "--http-listen=off",
            "--log-level=error",
        ]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith("KVTIER_")}
        self._process = subprocess.Popen(self._args, stdout=subprocess.PIPE, text=True, env=env)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("ready"):
            sys.exit(f"the node did not start: {line}")

    def stop(self) -> None:
        """Stops within kvtier serve --stop-within, after what is only in RAM was written down."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(60)
            self._process = None


def small_model(layers: int) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=16384,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config).eval()


def answer(model: Any, prefixes: PrefixCache | None, ids: torch.Tensor, new: int) -> list[int]:
    options = {
        "max_new_tokens": new,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
        "attention_mask": torch.ones_like(ids),
    }
    if prefixes is None:
        out = model.generate(ids, **options)
    else:
        hit = prefixes.restore(ids)
        out = model.generate(ids, past_key_values=hit.cache, **options)
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens


def seconds(do: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        do()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kvtier", default="bin/kvtier", help="the binary")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model = small_model(args.layers)
    ids = torch.randint(1, 500, (1, args.tokens + 1), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory(prefix="kvt") as directory:
        node = Node(args.kvtier, Path(directory))
        node.start()
        try:
            run(args, model, ids, node)
        finally:
            node.stop()


def run(args: argparse.Namespace, model: Any, ids: torch.Tensor, node: Node) -> None:
    want = answer(model, None, ids, 16)
    recompute = seconds(lambda: answer(model, None, ids, 1), args.rounds)
    rows: list[tuple[str, int, float, bool]] = [("recompute, no cache", 0, recompute, True)]
    with kvtier.Client(node.socket, engine="demo", stall_timeout=1.0) as client:
        prefixes = PrefixCache(client, model, block_tokens=BLOCK)

        def measure(name: str, times: int) -> None:
            taken = seconds(lambda: answer(model, prefixes, ids, 1), times)
            hit = prefixes.restore(ids)
            rows.append((name, hit.tokens, taken, answer(model, prefixes, ids, 16) == want))

        measure("cold: nothing stored", args.rounds)
        began = time.perf_counter()
        prefixes.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)
        stored = time.perf_counter() - began
        measure("warm, from RAM", args.rounds)
        node.stop()
        node.start()
        client.wait_ready(10)
        began = time.perf_counter()
        first = answer(model, prefixes, ids, 1)
        taken = time.perf_counter() - began
        rows.append(("warm, from NVMe, node restarted", prefixes.restore(ids).tokens, taken, first == want[:1]))
    size = sum(part.page_bytes for part in prefixes.layout.parts) * (args.tokens // BLOCK)
    print(f"\n{args.tokens + 1} tokens, {args.layers} layers, {size / 2**20:.0f} MiB of keys and values\n")
    print(f"{'':33} {'tokens hit':>10} {'first token':>12} {'of recompute':>13}  same tokens")
    for name, tokens, taken, equal in rows:
        print(f"{name:33} {tokens:10} {taken * 1000:9.1f} ms {taken / recompute:12.3f}x  {'yes' if equal else 'NO'}")
    print(f"{'prefill and storing all of it':33} {'':10} {stored * 1000:9.1f} ms {stored / recompute:12.3f}x")
    if not all(equal for *_, equal in rows) or any(not row[1] for row in rows[2:]):
        sys.exit("the cache changed the answer, or had no hit")


if __name__ == "__main__":
    main()
