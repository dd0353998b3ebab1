"""One host pool of SGLang: what its pages are, and where the pages of some keys lie in memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from kvtier._memory import Bytes
from kvtier.chain import SGLANG
from kvtier.errors import IncompatibleError, InvalidError
from kvtier.words import Layout, Part

KV = "kv"  # SGLang's name of the pool that the others go with

_EPOCH = 1
_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")

Move = Callable[[int, Bytes], None]  # copies the page of the key with this index
Runs = list[tuple[int, int]]  # address and length of each fragment of a page


class Pool:
    """Pages of one kind. `logical`: it holds no bytes, and other pools stand for its pages."""

    def __init__(self, host: Any, name: str, config: Any, revision: str, by_pointer: bool) -> None:
        self.host, self.name, self.order = host, name, str(getattr(host, "layout", ""))
        if self.order not in _LAYOUTS or getattr(host, "stores_page_envelope", False):
            raise IncompatibleError(f"host pool layout {self.order!r}; this backend works with {', '.join(_LAYOUTS)}")
        self.page_tokens = int(host.page_size)
        self.logical = not int(getattr(host, "size_per_token", 1))
        self.by_pointer = by_pointer and not self.logical
        self.replicated = bool(config.is_mla_model) and (name == KV or not _own_to_rank(host, name))
        self.layout: Layout | None = None
        if not self.logical:
            self.layout = self._layout_of(config, revision)

    def _layout_of(self, config: Any, revision: str) -> Layout:
        pool = self.host
        size, pieces = self._page_size()
        tag = getattr(pool, "storage_format_tag", None)
        rank = "all" if self.replicated else f"{config.tp_rank}"
        place = [
            f"tp{rank}of{config.tp_size}",
            f"pp{config.pp_rank}of{config.pp_size}",
            f"cp{getattr(config, 'attn_cp_rank', 0)}of{getattr(config, 'attn_cp_size', 1)}",
            f"dcp{getattr(config, 'dcp_rank', 0)}of{getattr(config, 'dcp_size', 1)}",
        ]
        side = [] if self.name == KV else [self.name, type(pool).__name__, f"page{self.page_tokens}"]
        return Layout(
            model=str(config.model_name),
            revision=revision,
            kv_dtype=str(pool.dtype).removeprefix("torch."),
            attention="mla" if config.is_mla_model else "gqa",
            layers=max(int(getattr(pool, "layer_num", 0) or getattr(pool, "num_mamba_layers", 0)), 1),
            kv_heads=int(getattr(pool, "head_num", 0) or 0),
            head_dim=int(getattr(pool, "head_dim", 0) or 0),
            engine_layout="/".join(["sglang", *side, self.order, pieces, *place, *([str(tag)] if tag else [])]),
            engine_epoch=_EPOCH,
            tensor_parallel=max(int(config.tp_size), 1),
            pipeline_parallel=max(int(config.pp_size), 1),
            hash_algorithm=SGLANG,
            block_tokens=self.page_tokens,
            parts=(Part("page", size),),
        )

    def _page_size(self) -> tuple[int, str]:
        """Bytes of a page, and how they are taken out of the pool. By address where the pool can tell them."""
        if self.by_pointer:
            try:
                _, sizes = self.host.get_page_buffer_meta(torch.arange(self.page_tokens))
                return sum(sizes), f"pointers/{len(sizes)}"
            except (NotImplementedError, ValueError, AttributeError):
                if self.name == KV:
                    raise
                self.by_pointer = False
        flat = self.host.get_dummy_flat_data_page()
        return flat.numel() * flat.element_size(), "flat"

    def reader(self, keys: list[str], indices: torch.Tensor) -> Move:
        """Copies pages into the pool, at indices: page_tokens of them a key."""
        self._check(keys, indices)
        if self.by_pointer:
            places = self._places(keys, indices)
            return lambda at, page: _copy_out(page, places[at])
        starts = indices[:: self.page_tokens].tolist()

        def put(at: int, page: Bytes) -> None:
            into = self.host.get_dummy_flat_data_page()
            copy_to(into, page)
            self.host.set_from_flat_data_page(starts[at], into)

        return put

    def writer(self, keys: list[str], indices: torch.Tensor) -> Move:
        """Copies pages out of the pool."""
        self._check(keys, indices)
        if self.by_pointer:
            places = self._places(keys, indices)
            return lambda at, page: _copy_in(page, places[at])
        starts = indices[:: self.page_tokens].tolist()
        return lambda at, page: copy_from(page, self.host.get_data_page(starts[at], flat=True))

    def _check(self, keys: list[str], indices: torch.Tensor) -> None:
        if len(indices) != len(keys) * self.page_tokens:
            raise InvalidError(
                f"{len(indices)} indices for {len(keys)} pages of {self.page_tokens} in pool {self.name}"
            )

    def _places(self, keys: list[str], indices: torch.Tensor) -> list[Runs]:
        pointers, sizes = self.host.get_page_buffer_meta(indices)
        each = len(pointers) // max(len(keys), 1)
        runs = list(zip(pointers, sizes, strict=True))
        return [runs[at * each : (at + 1) * each] for at in range(len(keys))]


def _own_to_rank(host: Any, name: str) -> bool:
    """Whether each rank of a latent-attention model has other bytes in this pool: state, and a grouped-query draft."""
    return name == "mamba" or any(kind.__name__ == "MHATokenToKVPoolHost" for kind in type(host).__mro__)


def copy_to(into: torch.Tensor, page: Bytes) -> None:
    flat = into.view(-1).view(torch.uint8)
    if flat.numel() != page.size:
        raise InvalidError(f"a place of {flat.numel()} bytes for a page of {page.size}")
    flat.numpy()[:] = page


def copy_from(page: Bytes, value: torch.Tensor) -> None:
    flat = value.contiguous().view(-1).view(torch.uint8)
    if flat.numel() != page.size:
        raise InvalidError(f"a value of {flat.numel()} bytes for a page of {page.size}")
    page[:] = flat.numpy()


def _copy_out(page: Bytes, runs: Runs) -> None:
    _check_runs(page, runs)
    at = page.ctypes.data
    for pointer, size in runs:
        ctypes.memmove(pointer, at, size)
        at += size


def _copy_in(page: Bytes, runs: Runs) -> None:
    _check_runs(page, runs)
    at = page.ctypes.data
    for pointer, size in runs:
        ctypes.memmove(at, pointer, size)
        at += size


def _check_runs(page: Bytes, runs: Runs) -> None:
    total = sum(size for _, size in runs)
    if total != page.size:
        raise InvalidError(f"fragments of {total} bytes for a page of {page.size}")


def run_of(there: list[bool]) -> int:
    """The length of the leading run of what is there."""
    return there.index(False) if False in there else len(there)


def stops(there: list[bool], trailing: int) -> list[int]:
    """The lengths of prefix, ascending, whose last pages (all of them where trailing is 0) are there."""
    if not trailing:
        return list(range(1, run_of(there) + 1))
    out, run = [], 0
    for length, one in enumerate(there, 1):
        run = run + 1 if one else 0
        if run >= min(trailing, length):
            out.append(length)
    return out
