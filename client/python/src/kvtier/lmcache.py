"""LMCache's second level on a kvtier node: an adapter of its MP server.

    lmcache server ... --l2-adapter '{"type": "plugin", "module_path": "kvtier.lmcache", "class_name": "KvtierL2",
      "adapter_params": {"endpoint": "unix:///run/kvtier/kvtier.sock"}}'

An object of LMCache is a page here, copied once between LMCache's memory and the node's. Its key's model, rank,
group and salt, and the shapes and types of its tensors, make the namespace; the hash of its chunk is the name. A lock
is a lease. Nothing raises: a node that is absent or killed is a miss, and a store that fails is reported as such.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import blake3
import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters import base
from lmcache.v1.platform.event_notifier import create_event_notifier

from kvtier._memory import Bytes
from kvtier.client import Client
from kvtier.errors import IncompatibleError, InvalidError, KvtierError
from kvtier.lease import Lease
from kvtier.words import ItemOutcome, Layout, Mode, Namespace, Part, Tier, WriteOutcome

log = logging.getLogger("kvtier")

WORKS_WITH = "LMCache 0.5.6"

_EPOCH = 1
_MOVERS = 4  # loads and stores at once
_LOOKERS = 2  # lookups do not wait behind them
_MOST_TASKS = 4096  # not collected yet; what comes beyond has failed at once
_MOST_LOCKS = 1 << 16  # keys; beyond them the oldest lock goes, and its load looks again
_PARAMS = ("endpoint", "token", "salt", "revision", "chunk_size", "stall_timeout", "fetch_timeout", "staging_bytes")

_Place = tuple[str, int, int, str]  # model, rank, group, salt of a key


class _Lock:
    """Some keys of one lease."""

    def __init__(self, lease: Lease, keys: int) -> None:
        self.lease, self.left = lease, keys


class KvtierL2(base.L2AdapterInterface):  # type: ignore[misc]
    """Made by LMCache's factory. Its methods are called by any thread and do not wait for the node, but for delete."""

    def __new__(cls, *_: Any, **__: Any) -> KvtierL2:
        check_interface(cls)
        made: KvtierL2 = super().__new__(cls)
        return made

    def __init__(self, params: dict[str, Any] | None = None, l1_memory_desc: Any = None) -> None:
        mine = dict(params or {})
        unknown = sorted(set(mine) - set(_PARAMS))
        if unknown:
            raise InvalidError(f"unknown keys {unknown} in adapter_params; known are {', '.join(_PARAMS)}")
        endpoint = str(mine.get("endpoint", "unix:///run/kvtier/kvtier.sock"))
        if not endpoint.startswith("unix://"):
            raise InvalidError(f"endpoint is {endpoint!r}, want unix:// and the path of the node's socket")
        super().__init__(0)  # the node evicts by itself
        self._salt, self._revision = str(mine.get("salt", "")), str(mine.get("revision", ""))
        self._chunk = int(mine.get("chunk_size", 256))
        self._fetch_timeout = float(mine.get("fetch_timeout", 2.0))
        self._client = Client(
            endpoint.removeprefix("unix://"),
            token=str(mine.get("token", "")),
            engine="lmcache",
            stall_timeout=float(mine.get("stall_timeout", 0.25)),
            staging_bytes=int(mine.get("staging_bytes", 0)),
        )
        self._stored, self._looked, self._loaded = (create_event_notifier() for _ in range(3))
        self._movers = ThreadPoolExecutor(_MOVERS, thread_name_prefix="kvtier-l2")
        self._lookers = ThreadPoolExecutor(_LOOKERS, thread_name_prefix="kvtier-l2-lookup")
        self._lock = threading.Lock()  # of what follows
        self._next = self._running = 0
        self._closed = False
        self._done: dict[str, dict[int, Any]] = {"store": {}, "lookup": {}, "load": {}}
        self._shapes: dict[_Place, str] = {}
        self._spaces: dict[tuple[_Place, str], Namespace] = {}
        self._locks: OrderedDict[Any, list[tuple[_Lock, int]]] = OrderedDict()
        self._locked = 0
        self.failed = 0

    # Events.

    def get_store_event_fd(self) -> int:
        return int(self._stored.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._looked.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._loaded.fileno())

    def _submit(
        self, kind: str, threads: ThreadPoolExecutor, event: Any, do: Callable[[], Any], otherwise: Callable[[], Any]
    ) -> int:
        """Runs a task on another thread. Its result is there before its event."""
        with self._lock:
            self._next += 1
            task, full = self._next, self._closed or self._running >= _MOST_TASKS
            self._running += not full

        def finish(result: Any) -> None:
            with self._lock:
                self._done[kind][task] = result
                if not self._closed:
                    event.notify()

        def run() -> None:
            try:
                result = do()
            except KvtierError as e:
                self.failed += 1
                log.debug("%s: %s", kind, e)
                result = otherwise()
            except Exception:  # LMCache waits for the result of every task
                self.failed += 1
                log.exception("%s", kind)
                result = otherwise()
            with self._lock:
                self._running -= 1
            finish(result)

        if full:
            self.failed += 1
            finish(otherwise())
        else:
            threads.submit(run)
        return task

    # Names.

    def _namespace(self, place: _Place, shape: str, size: int) -> Namespace:
        with self._lock:
            self._shapes[place] = f"{size} {shape}"
            known = self._spaces.get((place, shape))
        if known is not None:
            return known
        model, rank, group, salt = place
        layout = Layout(
            model=model,
            revision=self._revision,
            kv_dtype=shape.split(" ", 1)[0],
            attention="hybrid",  # LMCache does not say; of any kind
            layers=1,  # which an object holds is in its shape
            engine_layout=f"lmcache/rank{rank:#x}/group{group}/{blake3.blake3(shape.encode()).hexdigest(16)}",
            engine_epoch=_EPOCH,
            hash_algorithm="lmcache/chunk",
            block_tokens=self._chunk,
            parts=(Part("object", size),),
        )
        made = self._client.register(layout, "/".join((self._salt, salt)).encode() if self._salt or salt else b"")
        with self._lock:
            self._spaces[place, shape] = made
        return made

    def _shape(self, place: _Place, descs: Any) -> tuple[str, int] | None:
        """Types, shapes and bytes of a group's objects: as LMCache says, else as they were stored."""
        desc = (descs or {}).get(place[2])
        if desc is not None:
            return _shape_of(desc.shapes, desc.dtypes)
        with self._lock:
            known = self._shapes.get(place)
        if known is None:
            return None
        size, shape = known.split(" ", 1)
        return shape, int(size)

    # Storing.

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        def store() -> Any:
            size = sum(self._store(place, rows, keys, objects) for place, rows in _places(keys).items())
            return L2StoreResult(True, size)

        return self._submit("store", self._movers, self._stored, store, lambda: L2StoreResult(False, 0))

    def _store(self, place: _Place, rows: list[int], keys: list[Any], objects: list[Any]) -> int:
        """Bytes that are new. KvtierError: an object is not stored."""
        out = 0
        kinds: dict[tuple[str, int], list[int]] = {}
        for row in rows:
            kinds.setdefault(_shape_of_object(objects[row]), []).append(row)
        for (shape, size), mine in kinds.items():
            ns, buffers = self._namespace(place, shape, size), [_buffer(objects[row], size) for row in mine]

            def fill(at: int, part: int, page: Bytes, buffers: list[Bytes] = buffers) -> None:
                page[:] = buffers[at]

            outcomes = self._client.write(ns, [_name(keys[row]) for row in mine], fill)
            new = [keys[row] for row, o in zip(mine, outcomes, strict=True) if o is WriteOutcome.COMMITTED]
            if new:
                self._notify_keys_stored(new, [size] * len(new))
            refused = [o for o in outcomes if not o.stored]
            if refused:
                raise InvalidError(f"{len(refused)} of {len(mine)} objects were not stored: {refused[0].name}")
            out += size * len(new)
        return out

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        with self._lock:
            out, self._done["store"] = self._done["store"], {}
            return out

    # Looking up: a lock is a lease.

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Any = None) -> int:
        def look() -> Any:
            found = Bitmap(len(keys))
            for place, rows in _places(keys).items():
                for row in self._look(place, rows, keys, group_layout_descs):
                    found.set(row)
            return found

        return self._submit("lookup", self._lookers, self._looked, look, lambda: Bitmap(len(keys)))

    def _look(self, place: _Place, rows: list[int], keys: list[Any], descs: Any) -> list[int]:
        shape = self._shape(place, descs)
        if shape is None:
            return []
        try:
            lease = self._fetch(self._namespace(place, *shape), [keys[row] for row in rows])
        except KvtierError as e:  # another group may still be served
            log.debug("lookup: %s", e)
            return []
        there = [(at, row) for at, row in enumerate(rows) if at < lease.rows and lease.tiers[at] is not Tier.NONE]
        there = [(at, row) for at, row in there if lease.page(at) is not None]
        if not there:
            lease.release(wait=False)
            return []
        lock = _Lock(lease, len(there))
        with self._lock:
            for at, row in there:
                self._locks.setdefault(keys[row], []).append((lock, at))
            self._locked += len(there)
            over: list[_Lock] = []
            while self._locked > _MOST_LOCKS:
                _, dropped = self._locks.popitem(last=False)
                self._locked -= len(dropped)
                over.extend(one for one, _ in dropped)
        self._end(over)
        return [row for _, row in there]

    def _fetch(self, ns: Namespace, keys: list[Any]) -> Lease:
        return self._client.fetch(ns, [_name(key) for key in keys], mode=Mode.SET, timeout=self._fetch_timeout)

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._take("lookup", task_id)

    def _take(self, kind: str, task: int) -> Any:
        with self._lock:
            return self._done[kind].pop(task, None)

    def submit_unlock(self, keys: list[Any]) -> None:
        ended = []
        with self._lock:
            for key in keys:
                held = self._locks.get(key)
                if held:
                    ended.append(held.pop()[0])
                    self._locked -= 1
                    if not held:
                        del self._locks[key]
        self._end(ended)

    def _end(self, locks: Sequence[_Lock]) -> None:
        for lock in locks:
            with self._lock:
                lock.left -= 1
                over = not lock.left
            if over:
                with contextlib.suppress(KvtierError):  # with a view under way it ends with that view
                    lock.lease.release(wait=False)

    # Loading.

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        def load() -> Any:
            out = Bitmap(len(keys))
            for place, rows in _places(keys).items():
                for row in self._load(place, rows, keys, objects):
                    out.set(row)
            good = [key for row, key in enumerate(keys) if out.test(row)]
            if good:
                self._notify_keys_accessed(good)
            return out

        return self._submit("load", self._movers, self._loaded, load, lambda: Bitmap(len(keys)))

    def _load(self, place: _Place, rows: list[int], keys: list[Any], objects: list[Any]) -> list[int]:
        """Out of the leases of the locks, and what has none out of a new one."""
        good: list[int] = []
        missing: list[int] = []
        for row in rows:
            with self._lock:
                held = self._locks.get(keys[row])
                lock, at = held[-1] if held else (None, 0)
            (good if lock is not None and _copy(lock.lease, at, objects[row]) else missing).append(row)
        kinds: dict[tuple[str, int], list[int]] = {}
        for row in missing:
            kinds.setdefault(_shape_of_object(objects[row]), []).append(row)
        for shape, mine in kinds.items():
            try:
                with self._fetch(self._namespace(place, *shape), [keys[row] for row in mine]) as lease:
                    good += [row for at, row in enumerate(mine) if at < lease.rows and _copy(lease, at, objects[row])]
            except KvtierError as e:
                log.debug("load: %s", e)
        return good

    def query_load_result(self, task_id: int) -> Any:
        return self._take("load", task_id)

    # The rest.

    def delete(self, keys: list[Any]) -> None:
        """Forgets objects. It waits for the node; one that cannot be reached has forgotten nothing."""
        for place, rows in _places(keys).items():
            shape = self._shape(place, None)
            if shape is None:
                continue
            mine = [keys[row] for row in rows]
            try:
                outcomes = self._client.drop(self._namespace(place, *shape), [_name(key) for key in mine])
            except KvtierError as e:
                log.debug("delete: %s", e)
                continue
            gone = (ItemOutcome.ACCEPTED, ItemOutcome.DEFERRED)
            dropped = [key for key, outcome in zip(mine, outcomes, strict=True) if outcome in gone]
            if dropped:
                self._notify_keys_deleted(dropped, [shape[1]] * len(dropped))

    def report_status(self) -> dict[str, Any]:
        with self._lock:
            return {
                "is_healthy": self._client.attached,
                "type": "kvtier",
                "socket": self._client.socket,
                "locked_keys": self._locked,
                "tasks": self._running,
                "failed_tasks": self.failed,
            }

    def close(self) -> None:
        """Waits for what is under way and ends every lock. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._lookers.shutdown()
        self._movers.shutdown()
        with self._lock:
            held = [one for locks in self._locks.values() for one, _ in locks]
            self._locks.clear()
            self._locked = 0
        self._end(held)
        self._client.close()
        for event in (self._stored, self._looked, self._loaded):
            event.close()


def _places(keys: Sequence[Any]) -> dict[_Place, list[int]]:
    """The indices of the keys of each model, rank, group and salt."""
    out: dict[_Place, list[int]] = {}
    for row, key in enumerate(keys):
        place = (key.model_name, key.kv_rank, getattr(key, "object_group_id", 0), getattr(key, "cache_salt", ""))
        out.setdefault(place, []).append(row)
    return out


def _name(key: Any) -> bytes:
    raw = bytes(key.chunk_hash)
    return raw if len(raw) == 32 else blake3.blake3(b"lmcache chunk " + raw).digest()


def _shape_of(shapes: Sequence[Any], dtypes: Sequence[Any]) -> tuple[str, int]:
    size = sum(int(np.prod(tuple(shape))) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    words = [f"{str(d).removeprefix('torch.')} {'x'.join(map(str, s))}" for s, d in zip(shapes, dtypes, strict=True)]
    return " ".join(words), size


def _shape_of_object(obj: Any) -> tuple[str, int]:
    shape, size = _shape_of(obj.get_shapes(), obj.get_dtypes())
    if obj.get_size() != size:
        raise InvalidError(
            f"an object of {obj.get_size()} bytes for tensors of {size}: serialised objects differ in size"
        )
    return shape, size


def _buffer(obj: Any, size: int) -> Bytes:
    """The memory of an object."""
    buffer = np.frombuffer(obj.byte_array, np.uint8)
    if buffer.size < size:
        raise InvalidError(f"an object of {size} bytes in {buffer.size} of memory")
    return buffer[:size]


def _copy(lease: Lease, row: int, obj: Any) -> bool:
    """Copies a page into an object. False: it is lost, or the lease has ended."""
    try:
        page = lease.page(row)
        if page is None:
            return False
        into = _buffer(obj, obj.get_size())
        if into.size != page.size:
            return False
        into[:] = page
        del page
        lease.check()
    except KvtierError:
        return False
    return True


def check_interface(adapter: type) -> None:
    """Makes sure that the installed LMCache asks for no more than this adapter has."""
    missing = sorted(getattr(adapter, "__abstractmethods__", ()))
    if missing:
        raise IncompatibleError(
            f"LMCache wants {', '.join(missing)} of an L2 adapter; this one works with {WORKS_WITH}"
        )
    names = set(inspect.signature(base.L2AdapterInterface.submit_lookup_and_lock_task).parameters)
    more = sorted(names - {"self", "keys", "group_layout_descs"})
    if more:
        raise IncompatibleError(f"LMCache's lookups have {', '.join(more)}; this adapter works with {WORKS_WITH}")
