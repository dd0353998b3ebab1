"""Prefixes of prompts kept across calls, processes and restarts, for models of Hugging Face transformers.

    prefixes = PrefixCache(client, model)
    hit = prefixes.restore(input_ids)          # hit.tokens need no prefill
    out = model.generate(input_ids, past_key_values=hit.cache)
    prefixes.save(out, hit.cache)

or, in one call, `prefixes.generate(input_ids, max_new_tokens=64)`.

A page holds the keys and values of one run of tokens, of all layers of one kind. Nothing here can make a
request fail: a node that is absent, full, slow or killed is a miss, which `stats` counts.
"""

from __future__ import annotations

import inspect
import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import blake3
import torch
import transformers
from transformers import cache_utils

from kvtier._memory import Bytes
from kvtier.chain import VLLM_DEFAULT_SEED, VLLM_SHA256, names_of_tokens
from kvtier.client import Client
from kvtier.errors import IncompatibleError, InvalidError, KvtierError, LostError
from kvtier.lease import Lease
from kvtier.words import Layout, Namespace, Part, Retention, Tier

log = logging.getLogger("kvtier")

WORKS_WITH = "transformers 5.16 to 5.19"

_EPOCH = 1  # of the order of bytes in a page
_SAMPLES = 512  # elements of each weight that its fingerprint reads
# What a config says about itself and not about the keys and values that its model computes.
_NOT_OF_KV = (
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "architectures",
    "use_cache",
    "_commit_hash",
)


@dataclass
class Hit:
    """The cache to generate with, and how much of the prompt it holds."""

    cache: Any  # a transformers.DynamicCache
    tokens: int = 0
    tiers: tuple[Tier, ...] = ()  # of the blocks of the first row
    why: str = ""  # it is a miss because of this error; empty: nothing went wrong


@dataclass
class Stats:
    """Counted since the PrefixCache was made."""

    prompt_tokens: int = 0
    restored_tokens: int = 0
    saved_blocks: int = 0
    failed_restores: int = 0
    failed_saves: int = 0
    last_error: str = ""


@dataclass
class _Layer:
    """Where the keys and values of one layer lie in the page of its part, counted in elements."""

    part: int
    key: tuple[int, int]  # heads, head dimension
    value: tuple[int, int]
    window: int  # 0: it attends to all tokens
    at: int = 0


@dataclass
class _Shape:
    layers: list[_Layer]
    dtype: torch.dtype
    parts: list[tuple[str, int, int]] = field(default_factory=list)  # name, window, elements of a page


class PrefixCache:
    """Saves and restores prefixes of one model.

    block_tokens: tokens of a page; only whole blocks are kept. model_id and revision name the weights; what is
    not given is taken from the model's config. Whatever they say, a fingerprint of config and weights is part
    of the namespace, so that two models never share pages.
    """

    def __init__(
        self,
        client: Client,
        model: Any,
        *,
        block_tokens: int = 64,
        model_id: str = "",
        revision: str = "",
        salt: bytes = b"",
        seed: str = VLLM_DEFAULT_SEED,
        fetch_timeout: float = 2.0,  # seconds that the node may take to bring pages up from disk
        retention: Retention | None = None,
    ) -> None:
        if block_tokens < 1:
            raise InvalidError(f"block_tokens is {block_tokens}, want at least 1")
        check_interface()
        self.client, self.model = client, model
        self.block_tokens, self.stats = block_tokens, Stats()
        self._salt, self._seed = salt, seed
        self._fetch_timeout, self._retention = fetch_timeout, retention
        self._shape = _probe(model, block_tokens)
        self.layout = _layout(model, self._shape, block_tokens, model_id, revision, seed)
        self._registered: Namespace | None = None
        self._lock = threading.Lock()

    def _namespace(self) -> Namespace:
        """Registered when the node is first there; the client does it again after a restart."""
        with self._lock:
            if self._registered is None:
                self._registered = self.client.register(self.layout, self._salt)
            return self._registered

    def names(self, tokens: Sequence[int]) -> list[bytes]:
        """The names of the full blocks of a prompt."""
        return names_of_tokens(tokens, self.block_tokens, self._seed)

    # Restoring.

    def restore(self, input_ids: torch.Tensor) -> Hit:
        """A cache with the longest stored prefix of each row, without the last token, which must be computed.

        input_ids is [batch, tokens] without padding; with several rows the prefix is that of the shortest hit.
        """
        rows = _rows(input_ids)
        most = (len(rows[0]) - 1) // self.block_tokens
        self.stats.prompt_tokens += len(rows) * len(rows[0])
        if most < 1:
            return Hit(_plain_cache())
        try:
            hit = self._restore([self.names(row)[:most] for row in rows])
        except KvtierError as e:
            self.stats.failed_restores += 1
            self.stats.last_error = str(e)
            log.debug("restore: %s", e)
            return Hit(_plain_cache(), why=str(e))
        self.stats.restored_tokens += len(rows) * hit.tokens
        return hit

    def _restore(self, names: list[list[bytes]]) -> Hit:
        ns = self._namespace()
        leases: list[Lease] = []
        for row in names:
            leases.append(self.client.fetch(ns, row, timeout=self._fetch_timeout))
        blocks = min(lease.usable_blocks for lease in leases)
        if not blocks:
            return Hit(_plain_cache())
        for i, lease in enumerate(leases):
            if lease.usable_blocks > blocks:  # a shorter prefix may need other pages of the windows
                leases[i] = self.client.fetch(ns, names[i][:blocks], timeout=self._fetch_timeout)
        if any(lease.usable_blocks < blocks for lease in leases):
            return Hit(_plain_cache())
        cache = _plain_cache()
        pages = [[self._pages(lease, part, blocks) for part in range(len(self._shape.parts))] for lease in leases]
        for index, layer in enumerate(self._shape.layers):
            mine = [row[layer.part] for row in pages]
            keys, values = self._gather(mine, layer)
            cache.update(keys.to(self.model.device), values.to(self.model.device), index)
        del pages, mine
        for lease in leases:
            lease.check()
        tiers = leases[0].tiers
        for lease in leases:
            lease.release(wait=False)
        return Hit(cache, blocks * self.block_tokens, tiers)

    def _pages(self, lease: Lease, part: int, blocks: int) -> list[torch.Tensor]:
        """The pages of a part, in place; zeros, which the mask hides, where a window does not reach."""
        name, window, elements = self._shape.parts[part]
        out = []
        for row in range(blocks):
            page = lease.tensor(row, part, dtype=self._shape.dtype)
            if page is None and not window:
                raise LostError(f"the page of block {row} part {name} is missing")
            out.append(page if page is not None else torch.zeros(elements, dtype=self._shape.dtype))
        return out

    def _gather(self, rows: list[list[torch.Tensor]], layer: _Layer) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of one layer, of all rows: the one copy of a hit."""
        (kh, kd), (vh, vd), n = layer.key, layer.value, self.block_tokens
        middle = layer.at + kh * n * kd
        end = middle + vh * n * vd
        keys = [torch.cat([page[layer.at : middle].view(kh, n, kd) for page in pages], dim=1) for pages in rows]
        values = [torch.cat([page[middle:end].view(vh, n, vd) for page in pages], dim=1) for pages in rows]
        return torch.stack(keys), torch.stack(values)

    # Saving.

    def save(self, input_ids: torch.Tensor, cache: Any, skip_tokens: int = 0) -> int:
        """Stores the full blocks that cache holds of input_ids, and tells how many are new.

        cache is the one of `restore`, after a forward pass or generate. skip_tokens: of a prefix that is known
        to be stored. What cannot be stored is counted, not raised.
        """
        rows = _rows(input_ids)
        length = self._check(cache, len(rows))
        first = skip_tokens // self.block_tokens
        new = 0
        try:
            ns = self._namespace()
            for index, row in enumerate(rows):
                names = self.names(row[:length])[first:]
                if names:
                    new += self._save_row(ns, cache, index, names, first)
        except KvtierError as e:
            self.stats.failed_saves += 1
            self.stats.last_error = str(e)
            log.debug("save: %s", e)
        self.stats.saved_blocks += new
        return new

    def _save_row(self, ns: Namespace, cache: Any, row: int, names: list[bytes], first: int) -> int:
        def fill(block: int, part: int, page: Bytes) -> None:
            into = torch.from_numpy(page).view(self._shape.dtype)
            start = (first + block) * self.block_tokens
            for layer, have in zip(self._shape.layers, cache.layers, strict=True):
                if layer.part == part:
                    self._fill(layer, have, row, start, into)

        outcomes = self.client.write(ns, names, fill, first=first, retention=self._retention)
        return sum(outcome.name == "COMMITTED" for outcome in outcomes)

    def _fill(self, layer: _Layer, have: Any, row: int, start: int, into: torch.Tensor) -> None:
        n, at = self.block_tokens, layer.at
        for (heads, dim), tensor in ((layer.key, have.keys), (layer.value, have.values)):
            into[at : at + heads * n * dim].view(heads, n, dim).copy_(tensor[row, :, start : start + n, :])
            at += heads * n * dim

    def _check(self, cache: Any, rows: int) -> int:
        """The tokens in cache. InvalidError: it is not one that this model made from what restore gave."""
        layers = list(getattr(cache, "layers", ()))
        if len(layers) != len(self._shape.layers):
            raise InvalidError(f"a cache of {len(layers)} layers, the model has {len(self._shape.layers)}")
        length = int(layers[0].get_seq_length())
        for i, (layer, have) in enumerate(zip(self._shape.layers, layers, strict=True)):
            for name, (heads, dim), tensor in (("keys", layer.key, have.keys), ("values", layer.value, have.values)):
                want = (rows, heads, length, dim)
                if tuple(tensor.shape) != want or tensor.dtype != self._shape.dtype:
                    raise InvalidError(
                        f"layer {i}: {name} are {tensor.dtype} {tuple(tensor.shape)}, want {self._shape.dtype} {want}: "
                        "pass the cache that restore() gave to the model"
                    )
        return length

    # Both.

    def generate(self, input_ids: torch.Tensor, **options: Any) -> Any:
        """`model.generate` that restores before and saves after. Options are those of generate."""
        hit = self.restore(input_ids)
        options.setdefault("attention_mask", torch.ones_like(input_ids))
        out = self.model.generate(input_ids, past_key_values=hit.cache, use_cache=True, **options)
        sequences = out if isinstance(out, torch.Tensor) else out.sequences
        if sequences.shape[0] == input_ids.shape[0]:  # beams and several returns are not rows of the prompt
            self.save(sequences, hit.cache, hit.tokens)
        return out


def check_interface() -> None:
    """Makes sure that the installed transformers has what this module uses."""
    missing = [
        name
        for name, found in (
            ("DynamicCache(config=)", "config" in inspect.signature(cache_utils.DynamicCache.__init__).parameters),
            ("DynamicLayer", hasattr(cache_utils, "DynamicLayer")),
            ("DynamicSlidingWindowLayer", hasattr(cache_utils, "DynamicSlidingWindowLayer")),
            ("DynamicCache.layers", hasattr(cache_utils.DynamicCache(), "layers")),
            ("DynamicCache.update", hasattr(cache_utils.DynamicCache, "update")),
        )
        if not found
    ]
    if missing:
        raise IncompatibleError(
            f"transformers {transformers.__version__} has no {', '.join(missing)}; this module works with {WORKS_WITH}"
        )


def _plain_cache() -> Any:
    """A cache that keeps every token of every layer, windows included: the mask hides what they do not see."""
    return cache_utils.DynamicCache()


def _rows(input_ids: torch.Tensor) -> list[list[int]]:
    if input_ids.dim() != 2 or not input_ids.shape[0] or not input_ids.shape[1]:
        raise InvalidError(f"input_ids of shape {tuple(input_ids.shape)}, want [batch, tokens] without padding")
    rows: list[list[int]] = input_ids.tolist()
    return rows


def _windows(model: Any) -> list[int]:
    """The window of each layer, 0 for all tokens. IncompatibleError for kinds of layers that have other state."""
    out = []
    for i, layer in enumerate(cache_utils.DynamicCache(config=model.config).layers):
        if type(layer) is cache_utils.DynamicLayer:
            out.append(0)
        elif type(layer) is cache_utils.DynamicSlidingWindowLayer:
            out.append(int(layer.sliding_window))
        else:
            raise IncompatibleError(
                f"layer {i} of {type(model).__name__} keeps a {type(layer).__name__}: only keys and values of full and "
                "sliding-window attention can be stored page by page"
            )
    return out


def _probe(model: Any, block_tokens: int) -> _Shape:
    """Asks the model itself, with one token, for the shape of what it keeps."""
    windows = _windows(model)
    cache = _plain_cache()
    with torch.no_grad():
        model(
            input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True
        )
    kept = [layer for layer in cache.layers if getattr(layer, "is_initialized", True) and layer.keys is not None]
    if len(kept) != len(windows) or any(type(layer) is not cache_utils.DynamicLayer for layer in kept):
        raise IncompatibleError(
            f"{type(model).__name__} keeps {len(kept)} layers of {len(windows)}: layers that share keys"
        )
    dtypes = {tensor.dtype for layer in kept for tensor in (layer.keys, layer.values)}
    if len(dtypes) != 1 or any(layer.keys.dim() != 4 or layer.keys.shape[2] != 1 for layer in kept):
        raise IncompatibleError(
            f"{type(model).__name__} keeps {dtypes} of shape {tuple(kept[0].keys.shape)}: unknown layout"
        )
    shape = _Shape([], dtypes.pop())
    kinds = sorted(set(windows))
    sizes = [0] * len(kinds)
    for layer, window in zip(kept, windows, strict=True):
        (_, kh, _, kd), (_, vh, _, vd) = layer.keys.shape, layer.values.shape
        part = kinds.index(window)
        shape.layers.append(_Layer(part, (kh, kd), (vh, vd), window, sizes[part]))
        sizes[part] += (kh * kd + vh * vd) * block_tokens
    shape.parts = [(f"window-{w}" if w else "full", w, n) for w, n in zip(kinds, sizes, strict=True)]
    return shape


def _layout(model: Any, shape: _Shape, block_tokens: int, model_id: str, revision: str, seed: str) -> Layout:
    config = model.config
    one = shape.layers[0]
    kinds = {layer.window for layer in shape.layers}
    heads = int(getattr(config.get_text_config(decoder=True), "num_attention_heads", one.key[0]))
    attention = "window" if kinds != {0} else "mla" if one.key != one.value else "mha" if one.key[0] == heads else "gqa"
    size = shape.dtype.itemsize
    return Layout(
        model=model_id or config.name_or_path or type(model).__name__,
        revision="+".join(filter(None, (revision or getattr(config, "_commit_hash", None), fingerprint(model)))),
        dtype=str(model.dtype).removeprefix("torch."),
        kv_dtype=str(shape.dtype).removeprefix("torch."),
        attention=attention,
        layers=len(shape.layers),
        kv_heads=one.key[0],
        head_dim=one.key[1],
        engine_layout=f"transformers-{transformers.__version__.split('.')[0]}/LKVHTD/{config._attn_implementation}",
        engine_epoch=_EPOCH,
        hash_algorithm=VLLM_SHA256,
        hash_seed=seed,
        block_tokens=block_tokens,
        parts=tuple(
            Part(
                name, elements * size, last_blocks=-(-(window - 1) // block_tokens) if window > 1 else int(bool(window))
            )
            for name, window, elements in shape.parts
        ),
    )


def fingerprint(model: Any) -> str:
    """A digest of the config and of a sample of every weight: other weights, another namespace."""
    digest = blake3.blake3()
    config = {k: v for k, v in model.config.to_dict().items() if k not in _NOT_OF_KV}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.named_parameters()):
        flat = weight.detach().reshape(-1)
        step = max(flat.numel() // _SAMPLES, 1)
        sample = flat[::step][:_SAMPLES].cpu().contiguous().view(torch.uint8).numpy()
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype} ".encode())
        digest.update(sample.tobytes())
    return digest.hexdigest(16)
