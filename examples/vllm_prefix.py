"""A prompt whose prefix is stored is not prefilled again: vLLM, offline, on a CPU or wherever it runs.

    kvtier serve --socket /tmp/k.sock &
    python examples/vllm_prefix.py MODEL --socket /tmp/k.sock

MODEL is a directory of a checkpoint or a name that vLLM can load. The prompt is asked twice; in between vLLM's own
prefix cache is emptied, so that the second answer's hits come from the node. Run it again and both do.
"""

from __future__ import annotations

import argparse
import time

import kvtier


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--socket", default=kvtier.DEFAULT_SOCKET)
    parser.add_argument("--tokens", type=int, default=1000, help="of the prompt")
    args = parser.parse_args()
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=args.model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=args.tokens + 64,
        kv_transfer_config={
            "kv_connector": "KvtierConnector",
            "kv_connector_module_path": "kvtier.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kvtier.endpoint": f"unix://{args.socket}"},
        },
    )
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": [1 + i * 7 % 400 for i in range(args.tokens)]}
    for turn in ("first", "second"):
        began = time.perf_counter()
        (out,) = llm.generate([prompt], sampling, use_tqdm=False)
        taken = time.perf_counter() - began
        tokens = list(out.outputs[0].token_ids)
        print(f"{turn}: {out.num_cached_tokens} of {args.tokens} tokens not computed, {taken:.2f} s, {tokens}")
        llm.reset_prefix_cache()


if __name__ == "__main__":
    main()
