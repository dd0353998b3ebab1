"""Small models with random weights whose keys and values matter: no hub, no download."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

COMMON = {"vocab_size": 512, "max_position_embeddings": 8192, "initializer_range": 0.2, "tie_word_embeddings": False}
ATTENTION = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}


def llama(kv_heads: int = 2, layers: int = 4, **more: Any) -> Any:
    config = hf.LlamaConfig(
        **{**COMMON, **ATTENTION, "num_key_value_heads": kv_heads, "num_hidden_layers": layers, **more}
    )
    return hf.LlamaForCausalLM(config)


def mistral() -> Any:
    """Sliding window in every layer."""
    config = hf.MistralConfig(**COMMON, **ATTENTION, num_key_value_heads=2, num_hidden_layers=3, sliding_window=24)
    return hf.MistralForCausalLM(config)


def gemma2() -> Any:
    """A sliding window in every other layer, with soft caps."""
    config = hf.Gemma2Config(**COMMON, **ATTENTION, num_key_value_heads=2, num_hidden_layers=4, sliding_window=40)
    return hf.Gemma2ForCausalLM(config)


def deepseek() -> Any:
    """Multi-head latent attention: keys and values have different widths."""
    config = hf.DeepseekV3Config(
        **COMMON,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        kv_lora_rank=32,
        q_lora_rank=48,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
    )
    return hf.DeepseekV3ForCausalLM(config)


MODELS = {
    "gqa": llama,
    "mha": lambda: llama(kv_heads=8),
    "window": mistral,
    "hybrid": gemma2,
    "mla": deepseek,
}


def make(kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return MODELS[kind]().eval()


def prompt(tokens: int, seed: int = 0, rows: int = 1) -> torch.Tensor:
    return torch.randint(1, 512, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def greedy(model: Any, ids: torch.Tensor, new: int = 24) -> torch.Tensor:
    """What the model says without any help."""
    out: torch.Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **options(new))
    return out


def options(new: int = 24) -> dict[str, Any]:
    return {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
