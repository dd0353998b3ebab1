"""Extents of the node mapped into this process, and the slot references that point into them."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import threading
import time

import numpy as np
import numpy.typing as npt

from kvtier._handoff import KIND_STAGING, Extent, Tether
from kvtier.errors import IncompatibleError, InvalidError, StorageError, UnavailableError
from kvtier.words import UNIT_BYTES

# A slot reference, 32 bytes (docs/formats.md). bytes 0: there is no page here.
SLOT = np.dtype([("extent", "<u4"), ("bytes", "<u4"), ("offset", "<u8"), ("generation", "<u8"), ("sum", "<u8")])

SlotTable = npt.NDArray[np.void]
Bytes = npt.NDArray[np.uint8]

MAX_MAPPINGS = 1 << 16  # a node that announces more is not believed
EXTENT_WAIT = 1.0  # seconds that a descriptor may come later than the slot that names it

_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_FUTURE_WRITE = 1, 2, 4, 16
_STAGING_SEALS = _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW
_EXTENT_SEALS = _STAGING_SEALS | _F_SEAL_FUTURE_WRITE


class Mapping:
    """One extent, mapped until the last reference to this object or to an array of it is gone."""

    def __init__(self, extent: Extent, tether: Tether | None) -> None:
        """Maps extent, whose descriptor stays the caller's."""
        self.id = extent.id
        self.staging = extent.kind == KIND_STAGING
        self.tether = None if self.staging else tether
        status = os.fstat(extent.fd)
        if status.st_size != extent.bytes or not stat.S_ISREG(status.st_mode):
            raise IncompatibleError(f"extent {extent.id} has {status.st_size} bytes, the node said {extent.bytes}")
        want = _STAGING_SEALS if self.staging else _EXTENT_SEALS
        try:
            seals = fcntl.fcntl(extent.fd, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0
        if seals & want != want:
            raise IncompatibleError(
                f"extent {extent.id} has seals {seals:#x}, want {want:#x}: it could change or vanish"
            )
        protection = mmap.PROT_READ | mmap.PROT_WRITE if self.staging else mmap.PROT_READ
        try:
            memory = mmap.mmap(extent.fd, extent.bytes, flags=mmap.MAP_SHARED, prot=protection)
        except OSError as e:
            raise StorageError(f"map extent {extent.id} of {extent.bytes} bytes: {e}") from e
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_DONTDUMP)
        self.bytes: Bytes = np.frombuffer(memory, np.uint8)  # keeps the mapping
        self.size = extent.bytes
        self.address = self.bytes.ctypes.data
        self.first = 0  # offset of the first slot
        if not self.staging:
            units = extent.bytes // UNIT_BYTES
            self.generations = self.bytes[: units * 8].view("<u8")
            self.first = -(-units * 8 // UNIT_BYTES) * UNIT_BYTES


class ExtentSet:
    """The mappings of one attachment. Leases and attempts hold those they use themselves."""

    def __init__(self, tether: Tether) -> None:
        self._tether: Tether | None = tether
        self._by_id: dict[int, Mapping] = {}
        self._changed = threading.Condition()

    def add(self, extents: list[Extent]) -> None:
        """Maps received extents and closes their descriptors, whatever happens."""
        try:
            for extent in extents:
                mapping = Mapping(extent, self._tether)
                with self._changed:
                    if self._tether is None:
                        return
                    if extent.id in self._by_id or len(self._by_id) >= MAX_MAPPINGS:
                        raise InvalidError(f"extent {extent.id} announced twice, or more than {MAX_MAPPINGS}")
                    self._by_id[extent.id] = mapping
                    self._changed.notify_all()
        finally:
            for extent in extents:
                os.close(extent.fd)

    def retire(self) -> None:
        """Forgets the mappings; those in use go with their last user."""
        with self._changed:
            self._tether = None
            self._by_id = {}
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def mapped_bytes(self) -> int:
        return sum(m.size for m in list(self._by_id.values()))

    def _await(self, extent: int) -> Mapping:
        deadline = time.monotonic() + EXTENT_WAIT
        with self._changed:
            while True:
                found = self._by_id.get(extent)
                if found is not None:
                    return found
                if self._tether is None:
                    raise UnavailableError("the attachment ended")
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise InvalidError(f"slot in extent {extent}, whose descriptor did not come")

    def resolve(self, slots: SlotTable, staging: bool) -> dict[int, Mapping]:
        """The mappings that a table of slot references uses, by extent.

        The table is not trusted: each slot with a page must lie inside a mapping of the right kind, aligned,
        behind the generation table.
        """
        used = slots[slots["bytes"] != 0]
        if used.size and (used["extent"] == used["extent"][0]).all():
            extents = [int(used["extent"][0])]
        else:
            extents = np.unique(used["extent"]).tolist()
        out: dict[int, Mapping] = {}
        for extent in extents:
            mapping = self._by_id.get(extent) or self._await(extent)
            if mapping.staging != staging:
                raise InvalidError(f"slot in extent {extent}, which is of the wrong kind")
            mine = used if len(extents) == 1 else used[used["extent"] == extent]
            offset, length, size = mine["offset"], mine["bytes"], np.uint64(mapping.size)
            if (
                (offset % np.uint64(UNIT_BYTES)).any()
                or (offset < np.uint64(mapping.first)).any()
                or (offset > size).any()
                or (length > size - offset).any()
            ):
                raise InvalidError(f"slot outside extent {extent} of {mapping.size} bytes, or not aligned")
            out[extent] = mapping
        return out
