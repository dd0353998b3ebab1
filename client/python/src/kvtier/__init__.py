"""kvtier: the KV cache of LLM inference outside the engine.

with kvtier.Client("/run/kvtier/kvtier.sock") as client:
    ns = client.register(layout)
    client.write(ns, names, fill)            # reserve, fill, commit, in rounds
    with client.fetch(ns, names) as lease:   # zero copy
        page = lease.page(0)                 # a numpy array over the node's memory
"""

import logging

from kvtier.attempt import Attempt
from kvtier.client import DEFAULT_SOCKET, Client
from kvtier.errors import (
    BadLayoutError,
    ClosedError,
    CorruptError,
    DeniedError,
    ExpiredError,
    ForkedError,
    FrozenError,
    IdentityMismatchError,
    IncompatibleError,
    InvalidError,
    KvtierError,
    LostError,
    MovedError,
    NoSpaceError,
    NotFoundError,
    OverQuotaError,
    StorageError,
    UnavailableError,
    UnknownAttachmentError,
    UnknownNamespaceError,
    ViewsInUseError,
)
from kvtier.lease import Lease
from kvtier.session import MoveProgress, Session, SessionEvent, SessionInfo, close_session, migrate, watch
from kvtier.ticket import Ticket
from kvtier.words import (
    ItemOutcome,
    Layout,
    Mode,
    Namespace,
    Part,
    Prefix,
    Reason,
    Retention,
    Shortfall,
    Tier,
    WriteOutcome,
)

logging.getLogger("kvtier").addHandler(logging.NullHandler())

__version__ = "0.1.0"

__all__ = [
    "DEFAULT_SOCKET",
    "Attempt",
    "BadLayoutError",
    "Client",
    "ClosedError",
    "CorruptError",
    "DeniedError",
    "ExpiredError",
    "ForkedError",
    "FrozenError",
    "IdentityMismatchError",
    "IncompatibleError",
    "InvalidError",
    "ItemOutcome",
    "KvtierError",
    "Layout",
    "Lease",
    "LostError",
    "Mode",
    "MoveProgress",
    "MovedError",
    "Namespace",
    "NoSpaceError",
    "NotFoundError",
    "OverQuotaError",
    "Part",
    "Prefix",
    "Reason",
    "Retention",
    "Session",
    "SessionEvent",
    "SessionInfo",
    "Shortfall",
    "StorageError",
    "Ticket",
    "Tier",
    "UnavailableError",
    "UnknownAttachmentError",
    "UnknownNamespaceError",
    "ViewsInUseError",
    "WriteOutcome",
    "close_session",
    "migrate",
    "watch",
]
