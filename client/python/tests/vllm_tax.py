"""Miss tax of the vLLM connector: time to first token with it and nothing reused, beside the same engine without it.

    bin/engines/bin/python client/python/tests/vllm_tax.py

Two engines in two processes take turns with each prompt, so that a machine that gets slower slows both; what is to
be read is the median of the ratios of the pairs.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

TOKENS, WARM, PAIRS = 1024, 4, 30


def child(checkpoint: str, socket: str) -> None:
    from engine_vllm_child import engine, generate

    off: dict[str, Any] = {} if socket else {"kv_transfer_config": None}
    llm = engine(checkpoint, socket, num_gpu_blocks_override=100, max_num_batched_tokens=TOKENS, **off)
    print("READY", flush=True)
    for line in sys.stdin:
        prompt = json.loads(line)
        began = time.perf_counter()
        generate(llm, [prompt], 1)
        took = time.perf_counter() - began
        llm.reset_prefix_cache()
        print(f"TOOK {took}", flush=True)


def start(checkpoint: str, socket: str) -> subprocess.Popen[str]:
    args = [sys.executable, __file__, checkpoint, socket]
    return subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def said(one: subprocess.Popen[str], word: str) -> str:
    assert one.stdout is not None
    for line in one.stdout:
        if line.startswith(word):
            return line.removeprefix(word).strip()
    raise AssertionError("the engine ended")


def took(one: subprocess.Popen[str], prompt: list[int]) -> float:
    assert one.stdin is not None
    one.stdin.write(json.dumps(prompt) + "\n")
    one.stdin.flush()
    return float(said(one, "TOOK"))


def main() -> None:
    import torch
    from conftest import Nodes
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
    )
    nodes, engines = Nodes(), []
    with tempfile.TemporaryDirectory() as at:
        LlamaForCausalLM(shape).save_pretrained(at)
        try:
            node = nodes(nvme="0", ram="1GiB")
            engines += [start(at, node.socket), start(at, "")]
            for one in engines:
                said(one, "READY")
            ratios, ours, theirs = [], [], []
            for i in range(WARM + PAIRS):
                prompt = random.Random(i).choices(range(512), k=TOKENS)
                order = engines if i % 2 else engines[::-1]
                times = {id(one): took(one, prompt) for one in order}
                if i >= WARM:
                    ours.append(times[id(engines[0])])
                    theirs.append(times[id(engines[1])])
                    ratios.append(ours[-1] / theirs[-1])
        finally:
            for one in engines:
                one.kill()
                one.wait()
            nodes.close()
    low, high = sorted(ratios)[PAIRS // 4], sorted(ratios)[-PAIRS // 4]
    print(
        f"{TOKENS} tokens: {statistics.median(ours) * 1e3:.1f} ms with the connector, "
        f"{statistics.median(theirs) * 1e3:.1f} ms without; median of {PAIRS} ratios {statistics.median(ratios):.3f} "
        f"(quarters {low:.3f} to {high:.3f}), goal <= 1.02; load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    child(*sys.argv[1:]) if len(sys.argv) == 3 else main()
