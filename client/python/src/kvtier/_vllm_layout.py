"""What vLLM's configuration says about the bytes of its KV blocks. Both sides of the connector compute it."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3
import torch

from kvtier.chain import VLLM_DEFAULT_SEED
from kvtier.errors import IncompatibleError, InvalidError
from kvtier.words import MAX_PARTS, Layout, Part

WORKS_WITH = "vLLM 0.32"

_EPOCH = 1  # of the order of layers in a page
_BLOCK_OUTSIDE = (
    "LBHNC",
    "LBNHC",
    "BLHNC",
    "BLNHC",
    "HND",
    "NHD",
)  # layouts where a block of a layer is one run of bytes
_SAMPLE = 64 << 10  # bytes of each weight file that the fingerprint reads at its begin, middle and end


@dataclass(frozen=True)
class Group:
    """One KV cache group: layers that share block tables."""

    layers: tuple[str, ...]
    block_bytes: int  # of one block of one layer, on one rank
    window: int  # 0: every block is needed


@dataclass(frozen=True)
class Settings:
    """The keys of kv_connector_extra_config."""

    socket: str
    token: str
    salt: bytes
    stall_timeout: float
    fetch_timeout: float
    staging_bytes: int

    @classmethod
    def of(cls, vllm_config: Any) -> Settings:
        extra = dict(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
        mine = {k.removeprefix("kvtier."): v for k, v in extra.items() if k.startswith("kvtier.")}
        endpoint = str(mine.pop("endpoint", "unix:///run/kvtier/kvtier.sock"))
        if not endpoint.startswith("unix://"):
            raise InvalidError(f"kvtier.endpoint is {endpoint!r}, want unix:// and the path of the node's socket")
        out = cls(
            socket=endpoint.removeprefix("unix://"),
            token=str(mine.pop("token", os.environ.get("KVTIER_TOKEN", ""))),
            salt=str(mine.pop("salt", "")).encode(),
            stall_timeout=float(mine.pop("stall_timeout", 0.25)),
            fetch_timeout=float(mine.pop("fetch_timeout", 2.0)),
            staging_bytes=int(mine.pop("staging_bytes", 0)),
        )
        if mine:
            raise InvalidError(
                f"unknown keys {sorted('kvtier.' + k for k in mine)} in kv_connector_extra_config; known are endpoint, "
                "token, salt, stall_timeout, fetch_timeout and staging_bytes, each after kvtier."
            )
        return out


def groups(vllm_config: Any, kv_cache_config: Any) -> list[Group]:
    """The KV cache groups. IncompatibleError says in a sentence what cannot be stored."""
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size != 1:
            raise IncompatibleError(f"{name} is {size}; this connector works with 1")
    layout = getattr(kv_cache_config, "kv_cache_layout", None) or getattr(
        vllm_config.cache_config, "kv_cache_layout", None
    )
    if layout not in (None, *_BLOCK_OUTSIDE):
        raise IncompatibleError(f"KV cache layout {layout}; this connector works with {', '.join(_BLOCK_OUTSIDE)}")
    block = vllm_config.cache_config.block_size
    unit = getattr(kv_cache_config, "hash_block_size", None) or block
    out = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        kind = type(spec).__name__
        if kind not in ("FullAttentionSpec", "SlidingWindowSpec"):
            raise IncompatibleError(
                f"KV cache group of {kind}; this connector works with full and sliding-window attention"
            )
        if spec.block_size != unit:
            raise IncompatibleError(
                f"a group of {spec.block_size} tokens a block with hashes of {unit}: set one block size"
            )
        window = int(getattr(spec, "sliding_window", None) or 0) if kind == "SlidingWindowSpec" else 0
        out.append(Group(tuple(group.layer_names), int(spec.page_size_bytes), window))
    if not out:
        raise IncompatibleError("the model has no KV cache")
    if len(out) * parallel.tensor_parallel_size > MAX_PARTS:
        raise IncompatibleError(
            f"{len(out)} groups of {parallel.tensor_parallel_size} ranks are more than {MAX_PARTS} parts"
        )
    return out


def part_of(group: int, rank: int, ranks: int) -> int:
    """The number of the part of one group on one rank."""
    return group * ranks + rank


def layout(vllm_config: Any, kv_cache_config: Any) -> Layout:
    """The layout of the namespace."""
    found = groups(vllm_config, kv_cache_config)
    model, cache, ranks = (
        vllm_config.model_config,
        vllm_config.cache_config,
        vllm_config.parallel_config.tensor_parallel_size,
    )
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    block = block_tokens_of(vllm_config, kv_cache_config)
    algorithm, seed = _hash(cache.prefix_caching_hash_algo)
    parts = [
        Part(
            f"group{g}.rank{rank}",
            group.block_bytes * len(group.layers),
            last_blocks=-(-max(group.window - 1, 1) // block) if group.window else 0,
            ranks=(rank,) if ranks > 1 else (),
        )
        for g, group in enumerate(found)
        for rank in range(ranks)
    ]
    order = _order(vllm_config, kv_cache_config) or "default"
    device = str(getattr(vllm_config.device_config, "device_type", "unknown"))
    return Layout(
        model=str(model.model),
        revision="+".join(filter(None, (model.revision, _fingerprint(vllm_config)))),
        dtype=str(model.dtype).removeprefix("torch."),
        kv_dtype=str(getattr(spec, "dtype", cache.cache_dtype)).removeprefix("torch.") + f"/{cache.cache_dtype}",
        attention="hybrid"
        if any(g.window for g in found) and len(found) > 1
        else "window"
        if found[0].window
        else "gqa",
        layers=sum(len(g.layers) for g in found),
        kv_heads=int(getattr(spec, "num_kv_heads", 0)),
        head_dim=int(getattr(spec, "head_size", 0)),
        engine_layout=f"vllm/{order}/{device}/{_layers_digest(found)}",
        engine_epoch=_EPOCH,
        tensor_parallel=ranks,
        isa=_isa() if device == "cpu" else "",
        hash_algorithm=algorithm,
        hash_seed=seed,
        block_tokens=block,
        parts=tuple(parts),
    )


def _order(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """vLLM's name of the order of dimensions of its KV cache."""
    own = getattr(kv_cache_config, "kv_cache_layout", None)
    return own or getattr(vllm_config.cache_config, "kv_cache_layout", None)


def block_tokens_of(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens of a block, which is the unit of vLLM's hashes."""
    return int(getattr(kv_cache_config, "hash_block_size", None) or vllm_config.cache_config.block_size)


def _layers_digest(found: list[Group]) -> str:
    """The order of layers in a page is that of the group; which layers it has is part of the layout."""
    return blake3.blake3("\n\n".join("\n".join(g.layers) for g in found).encode()).hexdigest(8)


def _hash(algorithm: str) -> tuple[str, str]:
    """The name and seed of vLLM's block hashes. IncompatibleError: they are random in each process."""
    seed = os.environ.get("PYTHONHASHSEED")
    if algorithm.startswith("xxhash") and seed is None:
        raise IncompatibleError(
            f"--prefix-caching-hash-algo {algorithm} without PYTHONHASHSEED gives other hashes in each process: set "
            "PYTHONHASHSEED to one value on every engine, or use sha256_cbor"
        )
    name = f"vllm/{algorithm}"
    if not algorithm.endswith("_cbor"):  # hashes of what Python's serialisation makes of a block
        name += f"/{platform.python_implementation()}-{'.'.join(platform.python_version_tuple()[:2])}"
    return name, seed if seed is not None else VLLM_DEFAULT_SEED


def _isa() -> str:
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    return f"{platform.machine()}/{torch.backends.cpu.get_cpu_capability()}{'/amx' if amx else ''}"


def _fingerprint(vllm_config: Any) -> str:
    """A digest of the model's config and, of a local checkpoint, of a sample of each weight file."""
    model = vllm_config.model_config
    config = model.hf_config.to_dict()
    for volatile in ("_name_or_path", "transformers_version", "architectures", "_commit_hash"):
        config.pop(volatile, None)
    digest = blake3.blake3(json.dumps(config, sort_keys=True, default=str).encode())
    random = getattr(model, "seed", 0) if vllm_config.load_config.load_format == "dummy" else ""
    digest.update(f"{model.quantization} {random}".encode())
    _sample(digest, Path(str(model.model)))
    return digest.hexdigest(16)


def sample_weights(path: str) -> str:
    """A digest of the configuration and of a sample of each weight file of a local checkpoint; else empty."""
    at = Path(path)
    if not at.is_dir():
        return ""
    digest = blake3.blake3()
    config = at / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    _sample(digest, at)
    return digest.hexdigest(16)


def _sample(digest: Any, at: Path) -> None:
    if not at.is_dir():
        return
    for file in sorted(p for p in at.iterdir() if p.suffix in (".safetensors", ".bin", ".pt", ".gguf")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as weights:
            for start in sorted({0, max(size // 2, 0), max(size - _SAMPLE, 0)}):
                weights.seek(start)
                digest.update(weights.read(_SAMPLE))
