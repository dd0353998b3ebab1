"""The connection to a node and the methods of its service."""

from __future__ import annotations

import socket as sockets
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from kvtier.errors import DeniedError, InvalidError, UnavailableError
from kvtier.v1 import pages_pb2 as pb

KEEPALIVE_SECONDS = 30
KEEPALIVE_TIMEOUT_SECONDS = 10

_SERVICE = "/kvtier.v1.PagesService/"
_OPTIONS = [
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new link does not inherit the back-off of an old one
]

Request = TypeVar("Request", bound=Message, contravariant=True)
Answer = TypeVar("Answer", covariant=True)


class Call(Protocol[Answer]):
    """A call under way."""

    def result(self) -> Answer: ...
    def cancel(self) -> bool: ...


class Method(Protocol, Generic[Request, Answer]):
    """A unary method."""

    def future(
        self,
        request: Request,
        timeout: float | None = None,
        metadata: Metadata = None,
        wait_for_ready: bool | None = None,
    ) -> Call[Answer]: ...


Metadata = tuple[tuple[str, str | bytes], ...] | None


@dataclass
class Target:
    """Which node, and how to reach it: one of socket and address."""

    socket: str = ""
    address: str = ""
    tls: grpc.ChannelCredentials | None = None
    token: str = field(default="", repr=False)

    def validate(self) -> None:
        if bool(self.socket) == bool(self.address):
            raise InvalidError("give one of socket (a node on this machine) and address (host:port of another)")
        if self.tls is not None and not self.address:
            raise InvalidError("tls is for address only")
        if self.token and self.address and self.tls is None and not _loopback(self.address):
            raise InvalidError(f"a token for {self.address} needs tls: it would be sent in the clear")

    @property
    def metadata(self) -> Metadata:
        return (("authorization", f"Bearer {self.token}"),) if self.token else None

    def channel(self) -> grpc.Channel:
        """A connection that is not used yet."""
        if self.socket:
            return grpc.insecure_channel(f"unix:{self.socket}", [*_OPTIONS, ("grpc.default_authority", "kvtier")])
        if self.tls is not None:
            return grpc.secure_channel(self.address, self.tls, _OPTIONS)
        return grpc.insecure_channel(self.address, _OPTIONS)

    def probe(self, timeout: float) -> None:
        """Says in words why the socket cannot be used, which gRPC would wrap into a status."""
        if not self.socket:
            return
        with sockets.socket(sockets.AF_UNIX) as probe:
            probe.settimeout(timeout)
            try:
                probe.connect(self.socket)
            except PermissionError as e:
                raise DeniedError(
                    f"socket {self.socket}: {e}: join the group that owns it, or set kvtier serve --socket-group"
                ) from e
            except FileNotFoundError as e:
                raise UnavailableError(
                    f"socket {self.socket} does not exist: start `kvtier serve`, or name its --socket"
                ) from e
            except OSError as e:
                raise UnavailableError(f"socket {self.socket}: {e}: is `kvtier serve` running?") from e


def _loopback(address: str) -> bool:
    host = address.rsplit(":", 1)[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")


class Methods:
    """The methods of PagesService on one channel."""

    def __init__(self, channel: grpc.Channel) -> None:
        def unary(name: str, request: type[Message], answer: type[Message]) -> Any:
            return channel.unary_unary(
                _SERVICE + name, request_serializer=request.SerializeToString, response_deserializer=answer.FromString
            )

        self.attach: Any = channel.stream_stream(
            _SERVICE + "Attach",
            request_serializer=pb.AttachRequest.SerializeToString,
            response_deserializer=pb.AttachResponse.FromString,
        )
        self.read_pages: Any = channel.unary_stream(
            _SERVICE + "ReadPages",
            request_serializer=pb.ReadPagesRequest.SerializeToString,
            response_deserializer=pb.ReadPagesResponse.FromString,
        )
        self.write_pages: Any = channel.stream_unary(
            _SERVICE + "WritePages",
            request_serializer=pb.WritePagesRequest.SerializeToString,
            response_deserializer=pb.WritePagesResponse.FromString,
        )
        self.register: Method[pb.RegisterNamespaceRequest, pb.RegisterNamespaceResponse] = unary(
            "RegisterNamespace", pb.RegisterNamespaceRequest, pb.RegisterNamespaceResponse
        )
        self.lookup: Method[pb.LookupRequest, pb.LookupResponse] = unary("Lookup", pb.LookupRequest, pb.LookupResponse)
        self.renew: Method[pb.RenewRequest, pb.RenewResponse] = unary("Renew", pb.RenewRequest, pb.RenewResponse)
        self.reserve: Method[pb.ReserveRequest, pb.ReserveResponse] = unary(
            "Reserve", pb.ReserveRequest, pb.ReserveResponse
        )
        self.commit: Method[pb.CommitRequest, pb.CommitResponse] = unary("Commit", pb.CommitRequest, pb.CommitResponse)
        self.abort: Method[pb.AbortRequest, pb.AbortResponse] = unary("Abort", pb.AbortRequest, pb.AbortResponse)
        self.prefetch: Method[pb.PrefetchRequest, pb.PrefetchResponse] = unary(
            "Prefetch", pb.PrefetchRequest, pb.PrefetchResponse
        )
        self.cancel: Method[pb.CancelRequest, pb.CancelResponse] = unary("Cancel", pb.CancelRequest, pb.CancelResponse)
        self.retain: Method[pb.RetainRequest, pb.RetainResponse] = unary("Retain", pb.RetainRequest, pb.RetainResponse)
        self.demote: Method[pb.DemoteRequest, pb.DemoteResponse] = unary("Demote", pb.DemoteRequest, pb.DemoteResponse)
        self.drop: Method[pb.DropRequest, pb.DropResponse] = unary("Drop", pb.DropRequest, pb.DropResponse)
        self.pin: Method[pb.PinRequest, pb.PinResponse] = unary("Pin", pb.PinRequest, pb.PinResponse)
