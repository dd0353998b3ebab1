"""A prompt whose prefix is stored is not prefilled again: transformers, on any machine.

    kvtier serve --socket /tmp/k.sock &
    python examples/transformers_prefix.py --socket /tmp/k.sock [--model PATH]

Run it twice: the second process finds what the first has stored. Without --model it makes a small model with
random weights, always the same one.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import transformers

import kvtier
from kvtier.transformers import PrefixCache


def small_model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        initializer_range=0.2,
    )
    return transformers.LlamaForCausalLM(config).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", default=kvtier.DEFAULT_SOCKET)
    parser.add_argument("--model", default="", help="directory of a checkpoint")
    args = parser.parse_args()
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model).eval() if args.model else small_model()
    tokens = torch.randint(1, 500, (1, 1000), generator=torch.Generator().manual_seed(1))
    with kvtier.Client(args.socket) as client:
        prefixes = PrefixCache(client, model, block_tokens=32)
        out = prefixes.generate(tokens, max_new_tokens=8, do_sample=False, pad_token_id=0)
        print(f"{prefixes.stats.restored_tokens} of {prefixes.stats.prompt_tokens} prompt tokens were not computed")
        print("answer:", out[0, tokens.shape[1] :].tolist())
        if prefixes.stats.last_error:
            print("the cache did not help:", prefixes.stats.last_error)


if __name__ == "__main__":
    main()
