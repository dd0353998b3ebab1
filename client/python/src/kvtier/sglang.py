"""SGLang's HiCache storage on a kvtier node.

    python -m sglang.launch_server --enable-hierarchical-cache --hicache-mem-layout page_first \\
      --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvtier",
        "module_path": "kvtier.sglang", "class_name": "KvtierHiCache", "interface_v1": 1,
        "endpoint": "unix:///run/kvtier/kvtier.sock"}'

A page of SGLang is a page here. With interface_v1 its bytes are copied between SGLang's host pool and the node's
memory, once; without it they pass through the flat tensors of the older calls. Pools that go with the first, of
hybrid models and drafts, are stored page by page in namespaces of their own. SGLang's keys name tokens only: model,
types, layout, pool and ranks are in the namespace. No call raises: SGLang's threads would not survive it.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import blake3
import torch
from sglang.srt.mem_cache import hicache_storage

from kvtier._memory import Bytes
from kvtier._sglang_pool import KV, Move, Pool, copy_from, copy_to, run_of, stops
from kvtier.client import Client
from kvtier.errors import IncompatibleError, InvalidError, KvtierError
from kvtier.words import Mode, Namespace, Tier

log = logging.getLogger("kvtier")

WORKS_WITH = "SGLang 0.5.23"

_POLICIES = ("all_pages", "trailing_pages")  # which pages of a pool a prefix needs
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
        self._lock = threading.Lock()
        self._pools: dict[str, Pool] = {}
        self._registered: dict[str, Namespace] = {}

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Takes the host pool, whose pages are stored. IncompatibleError: their layout is not known."""
        super().register_mem_pool_host(mem_pool_host)
        self._pools[KV] = Pool(mem_pool_host, KV, self._config, self._revision, self._zero_copy)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Takes a pool that goes with the first, of a hybrid model or of a draft. Its pages have names of their own."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name != KV:
            self._pools[name] = Pool(host_pool, name, self._config, self._revision, True)

    def _pool(self, name: str = KV) -> Pool:
        pool = self._pools.get(name)
        if pool is None:
            raise InvalidError(f"host pool {name} is not registered")
        return pool

    def _namespace(self, name: str = KV) -> Namespace:
        layout = self._pool(name).layout
        if layout is None:
            raise InvalidError(f"host pool {name} holds no bytes")
        with self._lock:
            if name not in self._registered:
                self._registered[name] = self._client.register(layout, self._salt)
            return self._registered[name]

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
        return run_of(self._there(KV, keys))

    def _there(self, name: str, keys: list[str]) -> list[bool]:
        if not keys:
            return []

        def look() -> list[bool]:
            if self._pool(name).logical:
                return [True] * len(keys)
            found = self._client.lookup(self._namespace(name), _names(keys))
            return [tier is not Tier.NONE for tier in found.tiers]

        return self._guard("exists", look, [False] * len(keys))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    # Zero copy: pages of the host pool by address.

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._guard("get", lambda: self._read(KV, keys, host_indices), [False] * len(keys))

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._guard("set", lambda: self._write(KV, keys, host_indices), [False] * len(keys))

    def _read(self, name: str, keys: list[str], indices: torch.Tensor) -> list[bool]:
        pool = self._pool(name)
        return [True] * len(keys) if pool.logical else self._get(keys, pool.reader(keys, indices), name)

    def _write(self, name: str, keys: list[str], indices: torch.Tensor) -> list[bool]:
        pool = self._pool(name)
        return [True] * len(keys) if pool.logical else self._set(keys, pool.writer(keys, indices), name)

    # Several pools (v2): what goes with the pages of the first.

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """The longest prefix that every pool can serve, and all that would do.

        A pool whose pages cover only the end of a prefix has gaps, so each rank tells SGLang the whole set.
        """
        kv = self.batch_exists(keys, extra_info)
        hits: dict[Any, int] = {hicache_storage.PoolName.KV: kv} if kv else {}
        restorable = set(range(1, kv + 1))
        for transfer in pool_transfers or ():
            policy = str(getattr(transfer.hit_policy, "value", transfer.hit_policy))
            if policy not in _POLICIES:
                continue  # a pool that is not reported has no verdict: SGLang does not count on it
            trailing = max(1, len(transfer.keys or ())) if policy == "trailing_pages" else 0
            can = stops(self._there(str(transfer.name), keys[:kv]), trailing)
            if can:
                hits[transfer.name] = can[-1]
            restorable.intersection_update(can)
        told = sorted(restorable)
        return _result(told[-1] if told else 0, hits, told)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {t.name: self._transfer("get", self._read, t) for t in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {t.name: self._transfer("set", self._write, t) for t in transfers}

    def _transfer(self, verb: str, do: Callable[[str, list[str], torch.Tensor], list[bool]], t: Any) -> list[bool]:
        keys = list(t.keys or ())
        if not keys or t.host_indices is None:
            return [False] * len(keys)
        return self._guard(verb, lambda: do(str(t.name), keys, t.host_indices), [False] * len(keys))

    # Flat tensors.

    def batch_get(
        self, keys: list[str], target_locations: Sequence[torch.Tensor] | None = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = [None] * len(keys)

        def put(at: int, page: Bytes) -> None:
            into = (
                target_locations[at] if target_locations is not None else self.mem_pool_host.get_dummy_flat_data_page()
            )
            copy_to(into, page)
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
            copy_from(page, given[at])

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

    def _get(self, keys: list[str], put: Move, name: str = KV) -> list[bool]:
        """Copies what is stored. SGLang uses pages up to the first that is not there."""
        lease = self._client.fetch(self._namespace(name), _names(keys), mode=Mode.SET, timeout=self._fetch_timeout)
        out = [False] * len(keys)
        for row in range(lease.rows):
            page = lease.page(row)
            if page is not None:
                put(row, page)
                out[row] = True
            del page
        lease.release()  # LostError: pages were reused while they were copied
        return out

    def _set(self, keys: list[str], fill: Move, name: str = KV) -> list[bool]:
        if not self._writer and self._pool(name).replicated:
            return [True] * len(keys)  # another rank stores the same bytes
        outcomes = self._client.write(self._namespace(name), _names(keys), lambda at, part, page: fill(at, page))
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


def _result(kv: int, hits: dict[Any, int], restorable: list[int]) -> Any:
    """SGLang's answer, with what its release knows of."""
    known = {field.name for field in dataclasses.fields(hicache_storage.PoolTransferResult)}
    more = {"restorable_prefix_pages": restorable} if "restorable_prefix_pages" in known else {}
    return hicache_storage.PoolTransferResult(kv, hits, **more)


def check_interface(backend: type) -> None:
    """Makes sure that the installed SGLang asks for no more than this backend has."""
    missing = sorted(getattr(backend, "__abstractmethods__", ()))
    if missing:
        raise IncompatibleError(
            f"SGLang wants {', '.join(missing)} of a storage backend; this one works with {WORKS_WITH}"
        )
