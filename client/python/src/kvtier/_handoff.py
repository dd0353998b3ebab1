"""The hand-off socket: frames, and the tether whose life is the life of every mapping."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from dataclasses import dataclass

from kvtier.errors import DeniedError, IncompatibleError, InvalidError, UnavailableError
from kvtier.words import UNIT_BYTES

KIND_RAM = 1
KIND_STAGING = 2
MAX_EXTENTS = 64  # in one frame

_MAGIC = b"KVTH"
_VERSION = 1
_HELLO, _EXTENTS, _ACK = 1, 2, 3
_HEADER = struct.Struct("<4sHHI")
_ENTRY = struct.Struct("<IIQ")
_MAX_FRAME = _HEADER.size + 8 + MAX_EXTENTS * _ENTRY.size
_MAX_EXTENT_BYTES = 1 << 46


@dataclass
class Extent:
    """Memory that was handed over, with the descriptor that its receiver closes."""

    id: int
    kind: int
    bytes: int
    fd: int


def frame(kind: int, payload: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, _VERSION, kind, len(payload)) + payload


def decode_extents(packet: bytes) -> tuple[int, list[tuple[int, int, int]]]:
    """The sequence number and the (id, kind, bytes) of an extents frame."""
    if len(packet) < _HEADER.size + 8 or packet[:4] != _MAGIC:
        raise InvalidError(f"hand-off packet of {len(packet)} bytes is no frame")
    _, version, kind, length = _HEADER.unpack_from(packet)
    if version != _VERSION:
        raise IncompatibleError(f"hand-off frame has version {version}, want {_VERSION}")
    sequence, count = struct.unpack_from("<II", packet, _HEADER.size)
    if kind != _EXTENTS or length != len(packet) - _HEADER.size or not 0 < count <= MAX_EXTENTS:
        raise InvalidError(f"hand-off frame of kind {kind} with {length} bytes")
    if length != 8 + count * _ENTRY.size:
        raise InvalidError(f"hand-off frame of {count} extents with {length} bytes")
    entries = list(_ENTRY.iter_unpack(packet[_HEADER.size + 8 :]))
    for extent, extent_kind, size in entries:
        if extent_kind not in (KIND_RAM, KIND_STAGING):
            raise IncompatibleError(f"extent {extent} has kind {extent_kind}")
        if extent == 0 or not 0 < size <= _MAX_EXTENT_BYTES or size % UNIT_BYTES:
            raise InvalidError(f"extent {extent} of {size} bytes")
    return sequence, entries


class Tether:
    """The client's end of the hand-off socket.

    The node takes this process's memory for unread only once the socket is closed, which happens when the
    last mapping that holds this object is gone: mappings keep it alive, nobody closes it by hand.
    """

    def __init__(self, path: str, attachment: bytes, timeout: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(timeout)
            self._socket.connect(path)
            self._socket.send(frame(_HELLO, attachment))
        except PermissionError as e:
            self._socket.close()
            raise DeniedError(f"hand-off socket {path}: {e}: join the group that owns it") from e
        except OSError as e:
            self._socket.close()
            raise UnavailableError(f"hand-off socket {path}: {e}") from e

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> list[Extent]:
        """The extents of one frame, acknowledged. It blocks while there is none. ConnectionError at the end."""
        room = socket.CMSG_SPACE(MAX_EXTENTS * array.array("i").itemsize)
        packet, control, flags, _ = self._socket.recvmsg(_MAX_FRAME + 1, room, socket.MSG_CMSG_CLOEXEC)
        descriptors = _descriptors(control)
        try:
            if not packet:
                raise UnavailableError("the node closed the hand-off socket")
            if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
                raise InvalidError("a hand-off was cut off: raise the limit of open files (ulimit -n)")
            sequence, entries = decode_extents(packet)
            if len(descriptors) != len(entries):
                raise InvalidError(f"{len(entries)} extents came with {len(descriptors)} descriptors")
            self._socket.send(frame(_ACK, struct.pack("<II", sequence, len(descriptors))))
        except BaseException:
            for fd in descriptors:
                os.close(fd)
            raise
        return [Extent(*entry, fd) for entry, fd in zip(entries, descriptors, strict=True)]

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            self._socket.close()


def _descriptors(control: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()
