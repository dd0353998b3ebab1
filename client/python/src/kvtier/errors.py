"""The errors of kvtier: one class per meaning, each with what to do about it.

A cache may never make a request fail: whoever calls from an engine catches `KvtierError` and goes on as
if nothing were stored.
"""

from __future__ import annotations

from typing import Any

import grpc

from kvtier.v1 import types_pb2


class KvtierError(Exception):
    """Base of all errors of this package."""

    advice = ""
    retry_after: float | None = None  # seconds after which trying again may help; None: unknown

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}: {self.advice}" if self.advice else text


class NotFoundError(KvtierError):
    """Not stored, or not known."""


class NoSpaceError(KvtierError):
    """No room, and none could be made in time."""

    advice = "give the node more memory (kvtier serve --ram), or the client more staging"


class OverQuotaError(KvtierError):
    """The tenant's quota is used up."""

    advice = "raise the tenant's quota in the node's configuration, or drop what it does not need"


class CorruptError(KvtierError):
    """Bytes failed their checksum; that copy is not used."""

    advice = "the copy was dropped; recompute the block"


class IdentityMismatchError(CorruptError):
    """The stored bytes belong to another page."""


class ClosedError(KvtierError):
    """The object was closed."""

    advice = "make a new one"


class ExpiredError(KvtierError, TimeoutError):
    """A deadline passed."""


class UnknownNamespaceError(KvtierError):
    """The namespace is not registered on the node."""

    advice = "call Client.register first"


class InvalidError(KvtierError, ValueError):
    """An argument is wrong; the message names it."""


class BadLayoutError(InvalidError):
    """The layout cannot be accepted; the message names the field."""


class UnknownAttachmentError(KvtierError):
    """The attachment is not known to the node or has ended."""

    advice = "the client attaches again by itself; try again"


class DeniedError(KvtierError, PermissionError):
    """The caller may not do this."""


class IncompatibleError(KvtierError):
    """Protocol versions or layouts do not meet."""

    advice = "install the package and the node of one release"


class UnavailableError(KvtierError, ConnectionError):
    """The node cannot serve now: a miss. The client keeps trying to attach."""


class LostError(KvtierError):
    """A slot was reused while it was read: what was computed from it must be thrown away."""

    advice = "treat the page as a miss and recompute"


class StorageError(KvtierError):
    """The medium failed."""

    advice = "look at `kvtier status` and the node's log"


class FrozenError(KvtierError):
    """The session is being handed over to another node."""

    advice = "keep what is to be appended and try again: it takes some ten milliseconds"


class MovedError(KvtierError):
    """Another node owns the session; the message names it."""

    advice = "go on at that node, or open the session here with bring=True"


class ViewsInUseError(KvtierError):
    """Arrays made from a lease still exist."""

    advice = "drop every array and tensor made from the lease first, or let the last of them end it"


class ForkedError(KvtierError):
    """The client was made before a fork, and this is the child."""

    advice = "make a Client of its own in each process, after the fork (or start processes with spawn)"


def again(error: KvtierError) -> KvtierError:
    """A copy of an error that several callers get, each with a traceback of its own."""
    copy = type(error)(*error.args)
    copy.retry_after, copy.__cause__ = error.retry_after, error.__cause__
    return copy


_BY_CODE: dict[int, type[KvtierError]] = {
    types_pb2.ERROR_CODE_NOT_FOUND: NotFoundError,
    types_pb2.ERROR_CODE_NO_SPACE: NoSpaceError,
    types_pb2.ERROR_CODE_OVER_QUOTA: OverQuotaError,
    types_pb2.ERROR_CODE_CORRUPT: CorruptError,
    types_pb2.ERROR_CODE_CLOSED: ClosedError,
    types_pb2.ERROR_CODE_EXPIRED: ExpiredError,
    types_pb2.ERROR_CODE_UNKNOWN_NAMESPACE: UnknownNamespaceError,
    types_pb2.ERROR_CODE_BAD_LAYOUT: BadLayoutError,
    types_pb2.ERROR_CODE_INVALID: InvalidError,
    types_pb2.ERROR_CODE_UNKNOWN_ATTACHMENT: UnknownAttachmentError,
    types_pb2.ERROR_CODE_DENIED: DeniedError,
    types_pb2.ERROR_CODE_INCOMPATIBLE: IncompatibleError,
    types_pb2.ERROR_CODE_UNAVAILABLE: UnavailableError,
    types_pb2.ERROR_CODE_LOST: LostError,
    types_pb2.ERROR_CODE_IDENTITY_MISMATCH: IdentityMismatchError,
    types_pb2.ERROR_CODE_IO: StorageError,
    types_pb2.ERROR_CODE_FROZEN: FrozenError,
    types_pb2.ERROR_CODE_MOVED: MovedError,
}

# What gRPC itself says, without a detail of the node.
_BARE: dict[grpc.StatusCode, type[KvtierError]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: ExpiredError,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.PERMISSION_DENIED: DeniedError,
    grpc.StatusCode.UNAUTHENTICATED: DeniedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: NoSpaceError,
    grpc.StatusCode.UNIMPLEMENTED: IncompatibleError,
    grpc.StatusCode.DATA_LOSS: CorruptError,
    grpc.StatusCode.ABORTED: LostError,
}

# Statuses that say nothing of the node: it may not even have seen the call.
UNANSWERED = frozenset({grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE})


def from_detail(detail: types_pb2.ErrorDetail, verb: str = "") -> KvtierError:
    """The error that a detail of the wire names. An unknown code is IncompatibleError."""
    kind = _BY_CODE.get(detail.code, IncompatibleError)
    error = kind(f"{verb}: {detail.message}" if verb else detail.message)
    if detail.HasField("retry_after"):
        error.retry_after = detail.retry_after.ToNanoseconds() / 1e9
    return error


def from_rpc(rpc: grpc.RpcError, verb: str) -> KvtierError:
    """The error of a failed gRPC call."""
    code, text = rpc.code(), rpc.details()
    trailers: Any = rpc.trailing_metadata()
    for key, value in trailers or ():
        if key == "grpc-status-details-bin":
            detail = status_detail(value)
            if detail is not None:
                return from_detail(detail, verb)
    kind = _BARE.get(code, UnavailableError)
    return kind(f"{verb}: {code.name}: {text}")


_DETAIL_TYPE = b"/kvtier.v1.ErrorDetail"


def status_detail(status: bytes) -> types_pb2.ErrorDetail | None:
    """The ErrorDetail inside a google.rpc.Status, None if there is none or it is malformed."""
    try:
        for number, value in _fields(status):
            if number == 3 and isinstance(value, bytes):  # details, of type Any
                any_fields = dict(_fields(value))
                url, packed = any_fields.get(1), any_fields.get(2)
                if isinstance(url, bytes) and url.endswith(_DETAIL_TYPE) and isinstance(packed, bytes):
                    return types_pb2.ErrorDetail.FromString(packed)
    except Exception:  # whatever is wrong with it, the status code still tells the kind of error
        return None
    return None


def _fields(message: bytes) -> list[tuple[int, int | bytes]]:
    """The fields of a message on the wire: numbers as int, the rest as bytes. ValueError if cut off."""
    out: list[tuple[int, int | bytes]] = []
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 0:
            number, at = _varint(message, at)
            out.append((tag >> 3, number))
            continue
        if kind == 2:
            length, at = _varint(message, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if length > len(message) - at:
            raise ValueError("field cut off")
        out.append((tag >> 3, message[at : at + length]))
        at += length
    return out


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("number cut off")
