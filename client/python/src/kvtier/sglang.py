"""SGLang's HiCache storage on a kvtier node.

    python -m sglang.launch_server --enable-hierarchical-cache --hicache-mem-layout page_first \\
      --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvtier",
        "module_path": "kvtier.sglang", "class_name": "KvtierHiCache", "interface_v1": 1,
        "endpoint": "unix:///run/kvtier/kvtier.sock"}'

A page of SGLang is a page here. With interface_v1 its bytes are copied between SGLang's host pool and the node's
memory, once; without it they pass through the flat tensors of the older calls. SGLang's keys name tokens only:
model, types, layout and ranks are in the namespace. No call raises: SGLang's threads would not survive it.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import blake3
import torch
from sglang.srt.mem_cache import hicache_storage

from kvtier._memory import Bytes
from kvtier.chain import SGLANG
from kvtier.client import Client
from kvtier.errors import IncompatibleError, InvalidError, KvtierError
from kvtier.words import Layout, Mode, Namespace, Part

log = logging.getLogger("kvtier")

WORKS_WITH = "SGLang 0.5.23"

_EPOCH = 1
_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
# Keys of the extra config that SGLang itself reads.
_OF_SGLANG = {"backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size"}
_PREFIXES_OF_SGLANG = ("hicache_", "prefetch_")

T = TypeVar("T")


class KvtierHiCache(hicache_storage.HiCacheStorage):  # type: ignore[misc]
    """Made by SGLang's factory in each rank; then it is told the host pool."""

    def __new__(cls, *_: Any, **__: Any) -> KvtierHiCache:
        check_interface(cls)
        made: KvtierHiCache = super().__new__(cls)
        return made

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:
        self._config = storage_config
        extra = dict(storage_config.extra_config or {})
        mine = {k: v for k, v in extra.items() if k not in _OF_SGLANG and not k.startswith(_PREFIXES_OF_SGLANG)}
        endpoint = str(mine.pop("endpoint", "unix:///run/kvtier/kvtier.sock"))
        if not endpoint.startswith("unix://"):
            raise InvalidError(f"endpoint is {endpoint!r}, want unix:// and the path of the node's socket")
        if not storage_config.model_name:
            raise InvalidError("SGLang gives no model name, which keeps pages of models apart: set --served-model-name")
        self._fetch_timeout = float(mine.pop("fetch_timeout", 2.0))
        self._salt, self._revision = str(mine.pop("salt", "")).encode(), str(mine.pop("revision", ""))
        token, stall = str(mine.pop("token", "")), float(mine.pop("stall_timeout", 0.25))
        staging = int(mine.pop("staging_bytes", 0))
        if mine:
            raise InvalidError(
                f"unknown keys {sorted(mine)} in the extra config; known are endpoint, token, salt, revision, "
                "stall_timeout, fetch_timeout and staging_bytes"
            )
        self._zero_copy = bool(extra.get("interface_v1"))
        self._writer = bool(getattr(storage_config, "is_storage_writer", True))
        self._client = Client(
            endpoint.removeprefix("unix://"), token=token, engine="sglang", stall_timeout=stall, staging_bytes=staging
        )
        self._layout: Layout | None = None
        self._registered: Namespace | None = None
        self._lock = threading.Lock()
        self._page_bytes = 0

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Takes the host pool, whose pages are stored. IncompatibleError: their layout is not known."""
        super().register_mem_pool_host(mem_pool_host)
        pool_layout = str(getattr(mem_pool_host, "layout", ""))
        if pool_layout not in _LAYOUTS or getattr(mem_pool_host, "stores_page_envelope", False):
            raise IncompatibleError(f"host pool layout {pool_layout!r}; this backend works with {', '.join(_LAYOUTS)}")
        self._layout = self._layout_of(mem_pool_host, pool_layout)
        self._page_bytes = self._layout.parts[0].page_bytes

    def _layout_of(self, pool: Any, pool_layout: str) -> Layout:
        config = self._config
        if self._zero_copy:
            _, sizes = pool.get_page_buffer_meta(torch.arange(pool.page_size))
            size, order = sum(sizes), f"pointers/{len(sizes)}"
        else:
            flat = pool.get_dummy_flat_data_page()
            size, order = flat.numel() * flat.element_size(), "flat"
        tag = getattr(pool, "storage_format_tag", None)
        rank = "all" if config.is_mla_model else f"{config.tp_rank}"
        place = [
            f"tp{rank}of{config.tp_size}",
            f"pp{config.pp_rank}of{config.pp_size}",
            f"cp{getattr(config, 'attn_cp_rank', 0)}of{getattr(config, 'attn_cp_size', 1)}",
            f"dcp{getattr(config, 'dcp_rank', 0)}of{getattr(config, 'dcp_size', 1)}",
        ]
        heads, dim = int(getattr(pool, "head_num", 0) or 0), int(getattr(pool, "head_dim", 0) or 0)
        return Layout(
            model=str(config.model_name),
            revision=self._revision,
            kv_dtype=str(pool.dtype).removeprefix("torch."),
            attention="mla" if config.is_mla_model else "gqa",
            layers=max(int(pool.layer_num), 1),
            kv_heads=heads,
            head_dim=dim,
            engine_layout="/".join(["sglang", pool_layout, order, *place, *([str(tag)] if tag else [])]),
            engine_epoch=_EPOCH,
            tensor_parallel=max(int(config.tp_size), 1),
            pipeline_parallel=max(int(config.pp_size), 1),
            hash_algorithm=SGLANG,
            block_tokens=int(pool.page_size),
            parts=(Part("page", size),),
        )

    def _namespace(self) -> Namespace:
        with self._lock:
            if self._layout is None:
                raise InvalidError("the host pool is not registered yet")
            if self._registered is None:
                self._registered = self._client.register(self._layout, self._salt)
            return self._registered

    def _guard(self, verb: str, do: Callable[[], T], otherwise: T) -> T:
        """A miss for whatever goes wrong."""
        try:
            return do()
        except KvtierError as e:
            log.debug("%s: %s", verb, e)
        except Exception:  # SGLang's thread would end, and with it every later prefetch or backup
            log.exception("%s", verb)
        return otherwise

    # What exists.

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """The number of leading keys that are stored."""
        if not keys:
            return 0
        look = self._client.lookup
        return self._guard("exists", lambda: look(self._namespace(), _names(keys)).usable_blocks, 0)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    # Zero copy: pages of the host pool by address.

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        places = self._places(keys, host_indices)

        def put(at: int, page: Bytes) -> None:
            _copy_out(page, places[at])

        return self._guard("get", lambda: self._get(keys, put), [False] * len(keys))

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        places = self._places(keys, host_indices)

        def fill(at: int, page: Bytes) -> None:
            _copy_in(page, places[at])

        return self._guard("set", lambda: self._set(keys, fill), [False] * len(keys))

    def _places(self, keys: list[str], host_indices: torch.Tensor) -> list[list[tuple[int, int]]]:
        """Address and length of each fragment of each key's page."""
        pointers, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        each = len(pointers) // max(len(keys), 1)
        runs = list(zip(pointers, sizes, strict=True))
        return [runs[at * each : (at + 1) * each] for at in range(len(keys))]

    # Flat tensors.

    def batch_get(
        self, keys: list[str], target_locations: Sequence[torch.Tensor] | None = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = [None] * len(keys)

        def put(at: int, page: Bytes) -> None:
            into = (
                target_locations[at] if target_locations is not None else self.mem_pool_host.get_dummy_flat_data_page()
            )
            flat = into.view(-1).view(torch.uint8)
            if flat.numel() != page.size:
                raise InvalidError(f"a place of {flat.numel()} bytes for a page of {page.size}")
            flat.numpy()[:] = page
            found[at] = into

        good = self._guard("get", lambda: self._get(keys, put), [False] * len(keys))
        return [tensor if ok else None for tensor, ok in zip(found, good, strict=True)]

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        if values is None or len(values) != len(keys):
            return False
        given = values

        def fill(at: int, page: Bytes) -> None:
            flat = given[at].contiguous().view(-1).view(torch.uint8)
            if flat.numel() != page.size:
                raise InvalidError(f"a value of {flat.numel()} bytes for a page of {page.size}")
            page[:] = flat.numpy()

        return all(self._guard("set", lambda: self._set(keys, fill), [False]))

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def set(
        self, key: str, value: torch.Tensor | None = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return value is not None and self.batch_set([key], [value])

    # Both.

    def _get(self, keys: list[str], put: Callable[[int, Bytes], None]) -> list[bool]:
        """Copies what is stored. SGLang uses pages up to the first that is not there."""
        lease = self._client.fetch(self._namespace(), _names(keys), mode=Mode.SET, timeout=self._fetch_timeout)
        out = [False] * len(keys)
        for row in range(lease.rows):
            page = lease.page(row)
            if page is not None:
                put(row, page)
                out[row] = True
            del page
        lease.release()  # LostError: pages were reused while they were copied
        return out

    def _set(self, keys: list[str], fill: Callable[[int, Bytes], None]) -> list[bool]:
        if not self._writer:
            return [True] * len(keys)  # another rank stores the same bytes
        outcomes = self._client.write(self._namespace(), _names(keys), lambda at, part, page: fill(at, page))
        return [outcome.stored for outcome in outcomes]

    def close(self) -> None:
        self._client.close()


def _names(keys: Sequence[str]) -> list[bytes]:
    return [_name(key) for key in keys]


def _name(key: str) -> bytes:
    """SGLang's SHA-256 in hex is the name; a key of another form is hashed."""
    try:
        raw = bytes.fromhex(key)
    except ValueError:
        raw = b""
    return raw if len(raw) == 32 else blake3.blake3(b"sglang key " + key.encode()).digest()


def _copy_out(page: Bytes, runs: Sequence[tuple[int, int]]) -> None:
    _check_runs(page, runs)
    at = page.ctypes.data
    for pointer, size in runs:
        ctypes.memmove(pointer, at, size)
        at += size


def _copy_in(page: Bytes, runs: Sequence[tuple[int, int]]) -> None:
    _check_runs(page, runs)
    at = page.ctypes.data
    for pointer, size in runs:
        ctypes.memmove(at, pointer, size)
        at += size


def _check_runs(page: Bytes, runs: Sequence[tuple[int, int]]) -> None:
    total = sum(size for _, size in runs)
    if total != page.size:
        raise InvalidError(f"fragments of {total} bytes for a page of {page.size}")


def check_interface(backend: type) -> None:
    """Makes sure that the installed SGLang asks for no more than this backend has."""
    missing = sorted(getattr(backend, "__abstractmethods__", ()))
    if missing:
        raise IncompatibleError(
            f"SGLang wants {', '.join(missing)} of a storage backend; this one works with {WORKS_WITH}"
        )
