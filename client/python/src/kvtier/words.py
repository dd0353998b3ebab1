"""The nouns of kvtier: layouts, outcomes, tiers, and the bounds of a call."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf import duration_pb2

from kvtier.errors import InvalidError
from kvtier.v1 import pages_pb2, types_pb2

PROTOCOL_VERSION = 1
NAME_BYTES = 32
MAX_CALL_BLOCKS = 65536
MAX_PARTS = 64
UNIT_BYTES = 4096
MAX_CHUNK_BYTES = 1 << 20
MAX_PAGE_STREAM = 600.0  # seconds


class Tier(enum.IntEnum):
    """Where a block is served from."""

    NONE = 0
    HBM = 1
    RAM = 2
    NVME = 3
    REMOTE = 4


class Reason(enum.IntEnum):
    """Why a block is not served."""

    NONE = 0
    NOT_FOUND = 1
    PART_MISSING = 2
    NO_SPACE = 3
    OVER_QUOTA = 4
    TIMEOUT = 5
    CORRUPT = 6
    IDENTITY_MISMATCH = 7
    IO_ERROR = 8
    IN_FLIGHT = 9
    STOPPING = 10
    CANCELLED = 11
    ATTACHMENT_ENDED = 12
    UNKNOWN = 255  # a reason that this version does not know


class WriteOutcome(enum.IntEnum):
    """What happened to one block of a write."""

    NOT_REACHED = 0
    GRANTED = 1
    EXISTS = 2
    IN_FLIGHT = 3
    STAGING_FULL = 4
    NO_SPACE = 5
    OVER_QUOTA = 6
    COMMITTED = 7
    DUPLICATE = 8
    DUPLICATE_DIVERGENT = 9
    EXPIRED = 10
    NOT_DURABLE = 11
    CORRUPT = 12
    REPEATED = 13
    UNKNOWN = 255

    @property
    def stored(self) -> bool:
        """The block is stored, or being stored by someone."""
        return self in _STORED


_STORED = frozenset(
    {
        WriteOutcome.EXISTS,
        WriteOutcome.IN_FLIGHT,
        WriteOutcome.COMMITTED,
        WriteOutcome.DUPLICATE,
        WriteOutcome.DUPLICATE_DIVERGENT,
        WriteOutcome.NOT_DURABLE,
        WriteOutcome.REPEATED,
    }
)


class ItemOutcome(enum.IntEnum):
    """What a retention verb did to one block."""

    NONE = 0
    ACCEPTED = 1
    CLIPPED = 2
    DEFERRED = 3
    REJECTED = 4
    MISSING = 5
    UNKNOWN = 255


class Mode(enum.IntEnum):
    """Which blocks a fetch wants: the longest usable prefix, or each named block by itself."""

    PREFIX = pages_pb2.FETCH_MODE_PREFIX
    SET = pages_pb2.FETCH_MODE_SET


@dataclass(frozen=True)
class Part:
    """One slice of a block that one reader needs."""

    name: str
    page_bytes: int
    blocks_per_page: int = 1  # blocks that one page covers; the page lies at the last of them
    last_blocks: int = 0  # only the last n blocks before the point of reuse are needed; 0: every block
    ranks: tuple[int, ...] = ()  # ranks that read it; empty: all


@dataclass(frozen=True)
class Layout:
    """What page bytes mean. Two layouts that differ in any field never share a page."""

    model: str
    kv_dtype: str
    attention: str  # mha, gqa, mqa, mla, window, ssm or hybrid
    layers: int
    engine_layout: str
    hash_algorithm: str
    block_tokens: int
    parts: tuple[Part, ...]
    revision: str = ""
    dtype: str = ""
    kv_heads: int = 0
    head_dim: int = 0
    engine_epoch: int = 0
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    isa: str = ""
    hash_seed: str = ""

    @property
    def all_parts(self) -> int:
        """The set of all parts, as a bit mask."""
        return (1 << len(self.parts)) - 1

    def parts_of_ranks(self, ranks: Sequence[int]) -> int:
        """The set of the parts that any of the ranks reads; no ranks: all parts."""
        if not ranks:
            return self.all_parts
        return sum(1 << i for i, p in enumerate(self.parts) if not p.ranks or set(p.ranks) & set(ranks))

    def pages_at(self, block: int, parts: int) -> int:
        """The subset of parts that have a page at this position of a chain."""
        return sum(
            1 << i for i, p in enumerate(self.parts) if parts >> i & 1 and (block + 1) % max(p.blocks_per_page, 1) == 0
        )

    def to_wire(self) -> types_pb2.Layout:
        out = types_pb2.Layout(
            model=self.model,
            revision=self.revision,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            attention=self.attention,
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            engine_layout=self.engine_layout,
            engine_epoch=self.engine_epoch,
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            context_parallel=self.context_parallel,
            isa=self.isa,
            hash_algorithm=self.hash_algorithm,
            hash_seed=self.hash_seed,
            block_tokens=self.block_tokens,
        )
        for part in self.parts:
            out.parts.add(
                name=part.name,
                page_bytes=part.page_bytes,
                blocks_per_page=part.blocks_per_page,
                last_blocks=part.last_blocks,
                ranks=part.ranks,
            )
        return out


@dataclass(frozen=True)
class Namespace:
    """A layout and a salt as the node knows them for this client's tenant."""

    id: bytes
    layout: Layout
    salt: bytes = b""

    def __repr__(self) -> str:
        return f"Namespace({self.id[:6].hex()}, {self.layout.model})"


@dataclass(frozen=True)
class Shortfall:
    """Why consecutive blocks were not granted."""

    block: int
    count: int
    reason: Reason
    retry_after: float = 0.0  # seconds; 0: unknown


@dataclass(frozen=True)
class Prefix:
    """How much of a chain is stored."""

    usable_blocks: int
    usable_tokens: int
    tiers: tuple[Tier, ...]  # one a block; NONE: absent


@dataclass(frozen=True)
class Retention:
    """How long blocks are worth keeping."""

    priority: int  # 0 (evict first) to 100
    ttl: float = 0.0  # seconds after which the priority no longer counts; 0: never
    refresh_on_hit: bool = False

    def to_wire(self) -> pages_pb2.Retention:
        if not 0 <= self.priority <= 100:
            raise InvalidError(f"retention priority {self.priority}, want 0 to 100")
        return pages_pb2.Retention(priority=self.priority, ttl=span(self.ttl), refresh_on_hit=self.refresh_on_hit)


def number(e: enum.IntEnum) -> Any:
    """An enum as the wire takes it; generated types want their own."""
    return int(e)


def span(seconds: float | None) -> duration_pb2.Duration | None:
    """A duration of the wire; None and 0 are absent."""
    if not seconds:
        return None
    if not 0 < seconds < 1e9:
        raise InvalidError(f"a time of {seconds} s, want 0 or more and less than 1e9")
    out = duration_pb2.Duration()
    out.FromNanoseconds(int(seconds * 1e9))
    return out


def seconds(d: duration_pb2.Duration) -> float:
    """A duration of the wire in seconds."""
    return d.seconds + d.nanos / 1e9


def pack(names: Sequence[bytes]) -> bytes:
    """Block names as the wire wants them. InvalidError names the one that is no name."""
    if not names:
        raise InvalidError("no block is named")
    if len(names) > MAX_CALL_BLOCKS:
        raise InvalidError(
            f"{len(names)} blocks in one call, at most {MAX_CALL_BLOCKS}: name the rest in further calls"
        )
    packed = b"".join(names)
    if len(packed) != NAME_BYTES * len(names) or any(len(n) != NAME_BYTES for n in names):
        at = next(i for i, n in enumerate(names) if len(n) != NAME_BYTES)
        raise InvalidError(
            f"block name {at} has {len(names[at])} bytes, want {NAME_BYTES}: see kvtier.chain.block_name"
        )
    return packed


def tiers(octets: bytes) -> tuple[Tier, ...]:
    return tuple(Tier(o) if o <= Tier.REMOTE else Tier.NONE for o in octets)


def reason(number: int) -> Reason:
    return Reason(number) if number in Reason._value2member_map_ else Reason.UNKNOWN


def write_outcomes(octets: Iterable[int]) -> list[WriteOutcome]:
    known = WriteOutcome._value2member_map_
    return [WriteOutcome(o) if o in known else WriteOutcome.UNKNOWN for o in octets]


def item_outcomes(octets: Iterable[int]) -> list[ItemOutcome]:
    known = ItemOutcome._value2member_map_
    return [ItemOutcome(o) if o in known else ItemOutcome.UNKNOWN for o in octets]


def shortfalls(wire: Iterable[pages_pb2.Shortfall]) -> list[Shortfall]:
    return [Shortfall(s.block, s.count, reason(s.reason), seconds(s.retry_after)) for s in wire]


def part_numbers(parts: int) -> list[int]:
    """The numbers of the parts in a set, rising."""
    return [i for i in range(MAX_PARTS) if parts >> i & 1]
