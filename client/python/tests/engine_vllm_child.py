"""One vLLM engine with the connector, for the tests: prompts in, tokens and hits out, as JSON.

usage: engine_vllm_child.py CHECKPOINT SOCKET JSON-OPTIONS
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler in this process: tests look into it
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "HF_HUB_OFFLINE": "1",
}

BLOCK = 32


def engine(checkpoint: str, socket: str, **options: Any) -> Any:
    os.environ.update(ENVIRONMENT)
    from vllm import LLM

    settings: dict[str, Any] = {
        "model": checkpoint,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "block_size": BLOCK,
        "enable_prefix_caching": True,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 128,  # longer prompts are computed in chunks
        "disable_log_stats": True,
        "kv_transfer_config": {
            "kv_connector": "KvtierConnector",
            "kv_connector_module_path": "kvtier.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kvtier.endpoint": f"unix://{socket}", "kvtier.stall_timeout": 3},
        },
    }
    return LLM(**{**settings, **options})


def generate(llm: Any, prompts: list[list[int]], new: int = 16) -> list[tuple[list[int], int]]:
    """For each prompt the tokens of the answer, and how many of its own were not computed."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=new)
    done = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    return [(list(o.outputs[0].token_ids), int(o.num_cached_tokens or 0)) for o in done]


def main() -> None:
    checkpoint, socket, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    prompts = options.pop("prompts")
    llm = engine(checkpoint, socket, **options)
    rounds = []
    for _ in range(2):
        rounds.append([generate(llm, [prompt])[0] for prompt in prompts])
        assert llm.reset_prefix_cache()
    print("RESULT " + json.dumps(rounds), flush=True)


if __name__ == "__main__":
    main()
