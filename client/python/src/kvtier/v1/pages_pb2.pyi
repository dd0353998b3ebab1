import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from kvtier.v1 import directory_pb2 as _directory_pb2
from kvtier.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RevocationReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REVOCATION_REASON_UNSPECIFIED: _ClassVar[RevocationReason]
    REVOCATION_REASON_OVERDUE: _ClassVar[RevocationReason]
    REVOCATION_REASON_OPERATOR: _ClassVar[RevocationReason]

class FetchMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FETCH_MODE_UNSPECIFIED: _ClassVar[FetchMode]
    FETCH_MODE_PREFIX: _ClassVar[FetchMode]
    FETCH_MODE_SET: _ClassVar[FetchMode]

class WriteOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WRITE_OUTCOME_UNSPECIFIED: _ClassVar[WriteOutcome]
    WRITE_OUTCOME_GRANTED: _ClassVar[WriteOutcome]
    WRITE_OUTCOME_EXISTS: _ClassVar[WriteOutcome]
    WRITE_OUTCOME_IN_FLIGHT: _ClassVar[WriteOutcome]
    WRITE_OUTCOME_STAGING_FULL: _ClassVar[WriteOutcome]
    WRITE_OUTCOME_NO_SPACE: _ClassVar[WriteOutcome]
    WRITE_OUTCOME_OVER_QUOTA: _ClassVar[WriteOutcome]
    WRITE_OUTCOME_COMMITTED: _ClassVar[WriteOutcome]
    WRITE_OUTCOME_DUPLICATE: _ClassVar[WriteOutcome]
    WRITE_OUTCOME_DUPLICATE_DIVERGENT: _ClassVar[WriteOutcome]
    WRITE_OUTCOME_EXPIRED: _ClassVar[WriteOutcome]
    WRITE_OUTCOME_NOT_DURABLE: _ClassVar[WriteOutcome]
    WRITE_OUTCOME_CORRUPT: _ClassVar[WriteOutcome]
    WRITE_OUTCOME_REPEATED: _ClassVar[WriteOutcome]

class ItemOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ITEM_OUTCOME_UNSPECIFIED: _ClassVar[ItemOutcome]
    ITEM_OUTCOME_ACCEPTED: _ClassVar[ItemOutcome]
    ITEM_OUTCOME_CLIPPED: _ClassVar[ItemOutcome]
    ITEM_OUTCOME_DEFERRED: _ClassVar[ItemOutcome]
    ITEM_OUTCOME_REJECTED: _ClassVar[ItemOutcome]
    ITEM_OUTCOME_MISSING: _ClassVar[ItemOutcome]
REVOCATION_REASON_UNSPECIFIED: RevocationReason
REVOCATION_REASON_OVERDUE: RevocationReason
REVOCATION_REASON_OPERATOR: RevocationReason
FETCH_MODE_UNSPECIFIED: FetchMode
FETCH_MODE_PREFIX: FetchMode
FETCH_MODE_SET: FetchMode
WRITE_OUTCOME_UNSPECIFIED: WriteOutcome
WRITE_OUTCOME_GRANTED: WriteOutcome
WRITE_OUTCOME_EXISTS: WriteOutcome
WRITE_OUTCOME_IN_FLIGHT: WriteOutcome
WRITE_OUTCOME_STAGING_FULL: WriteOutcome
WRITE_OUTCOME_NO_SPACE: WriteOutcome
WRITE_OUTCOME_OVER_QUOTA: WriteOutcome
WRITE_OUTCOME_COMMITTED: WriteOutcome
WRITE_OUTCOME_DUPLICATE: WriteOutcome
WRITE_OUTCOME_DUPLICATE_DIVERGENT: WriteOutcome
WRITE_OUTCOME_EXPIRED: WriteOutcome
WRITE_OUTCOME_NOT_DURABLE: WriteOutcome
WRITE_OUTCOME_CORRUPT: WriteOutcome
WRITE_OUTCOME_REPEATED: WriteOutcome
ITEM_OUTCOME_UNSPECIFIED: ItemOutcome
ITEM_OUTCOME_ACCEPTED: ItemOutcome
ITEM_OUTCOME_CLIPPED: ItemOutcome
ITEM_OUTCOME_DEFERRED: ItemOutcome
ITEM_OUTCOME_REJECTED: ItemOutcome
ITEM_OUTCOME_MISSING: ItemOutcome

class AttachRequest(_message.Message):
    __slots__ = ("request_id", "hello", "fetch", "adopt", "release", "renew", "revoked", "abort")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    ADOPT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    hello: Hello
    fetch: FetchRequest
    adopt: AdoptRequest
    release: ReleaseRequest
    renew: RenewRequest
    revoked: Revoked
    abort: AbortRequest
    def __init__(self, request_id: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., fetch: _Optional[_Union[FetchRequest, _Mapping]] = ..., adopt: _Optional[_Union[AdoptRequest, _Mapping]] = ..., release: _Optional[_Union[ReleaseRequest, _Mapping]] = ..., renew: _Optional[_Union[RenewRequest, _Mapping]] = ..., revoked: _Optional[_Union[Revoked, _Mapping]] = ..., abort: _Optional[_Union[AbortRequest, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "engine", "engine_version", "group_id", "group_secret", "staging_bytes", "previous_attachment", "ranks", "device_pool", "working_bytes")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_SECRET_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_POOL_FIELD_NUMBER: _ClassVar[int]
    WORKING_BYTES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    engine: str
    engine_version: str
    group_id: str
    group_secret: bytes
    staging_bytes: int
    previous_attachment: bytes
    ranks: _containers.RepeatedScalarFieldContainer[int]
    device_pool: bool
    working_bytes: int
    def __init__(self, protocol_version: _Optional[int] = ..., engine: _Optional[str] = ..., engine_version: _Optional[str] = ..., group_id: _Optional[str] = ..., group_secret: _Optional[bytes] = ..., staging_bytes: _Optional[int] = ..., previous_attachment: _Optional[bytes] = ..., ranks: _Optional[_Iterable[int]] = ..., device_pool: bool = ..., working_bytes: _Optional[int] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("request_id", "welcome", "fetch", "adopt", "release", "renew", "error", "extents_added", "revocation", "prefetch", "stopping", "abort", "session")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    ADOPT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_ADDED_FIELD_NUMBER: _ClassVar[int]
    REVOCATION_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    welcome: Welcome
    fetch: FetchResponse
    adopt: AdoptResponse
    release: ReleaseResponse
    renew: RenewResponse
    error: _types_pb2.ErrorDetail
    extents_added: ExtentsAdded
    revocation: Revocation
    prefetch: PrefetchProgress
    stopping: Stopping
    abort: AbortResponse
    session: SessionEvent
    def __init__(self, request_id: _Optional[int] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., fetch: _Optional[_Union[FetchResponse, _Mapping]] = ..., adopt: _Optional[_Union[AdoptResponse, _Mapping]] = ..., release: _Optional[_Union[ReleaseResponse, _Mapping]] = ..., renew: _Optional[_Union[RenewResponse, _Mapping]] = ..., error: _Optional[_Union[_types_pb2.ErrorDetail, _Mapping]] = ..., extents_added: _Optional[_Union[ExtentsAdded, _Mapping]] = ..., revocation: _Optional[_Union[Revocation, _Mapping]] = ..., prefetch: _Optional[_Union[PrefetchProgress, _Mapping]] = ..., stopping: _Optional[_Union[Stopping, _Mapping]] = ..., abort: _Optional[_Union[AbortResponse, _Mapping]] = ..., session: _Optional[_Union[SessionEvent, _Mapping]] = ...) -> None: ...

class SessionEvent(_message.Message):
    __slots__ = ("session", "tenant", "gone", "state", "owner", "epoch", "target", "blocks", "owner_address")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OWNER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    session: str
    tenant: str
    gone: bool
    state: _directory_pb2.SessionState
    owner: bytes
    epoch: int
    target: bytes
    blocks: int
    owner_address: str
    def __init__(self, session: _Optional[str] = ..., tenant: _Optional[str] = ..., gone: bool = ..., state: _Optional[_Union[_directory_pb2.SessionState, str]] = ..., owner: _Optional[bytes] = ..., epoch: _Optional[int] = ..., target: _Optional[bytes] = ..., blocks: _Optional[int] = ..., owner_address: _Optional[str] = ...) -> None: ...

class SessionRange(_message.Message):
    __slots__ = ("session", "from_block", "to_block")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FROM_BLOCK_FIELD_NUMBER: _ClassVar[int]
    TO_BLOCK_FIELD_NUMBER: _ClassVar[int]
    session: str
    from_block: int
    to_block: int
    def __init__(self, session: _Optional[str] = ..., from_block: _Optional[int] = ..., to_block: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("attachment", "protocol_version", "node", "incarnation", "handoff_socket", "tenant", "arenas", "staging_extent", "staging_bytes", "lease_ttl", "working_extent", "working_bytes")
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_SOCKET_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ARENAS_FIELD_NUMBER: _ClassVar[int]
    STAGING_EXTENT_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_FIELD_NUMBER: _ClassVar[int]
    WORKING_EXTENT_FIELD_NUMBER: _ClassVar[int]
    WORKING_BYTES_FIELD_NUMBER: _ClassVar[int]
    attachment: bytes
    protocol_version: int
    node: bytes
    incarnation: int
    handoff_socket: str
    tenant: str
    arenas: _containers.RepeatedCompositeFieldContainer[Arena]
    staging_extent: int
    staging_bytes: int
    lease_ttl: _duration_pb2.Duration
    working_extent: int
    working_bytes: int
    def __init__(self, attachment: _Optional[bytes] = ..., protocol_version: _Optional[int] = ..., node: _Optional[bytes] = ..., incarnation: _Optional[int] = ..., handoff_socket: _Optional[str] = ..., tenant: _Optional[str] = ..., arenas: _Optional[_Iterable[_Union[Arena, _Mapping]]] = ..., staging_extent: _Optional[int] = ..., staging_bytes: _Optional[int] = ..., lease_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., working_extent: _Optional[int] = ..., working_bytes: _Optional[int] = ...) -> None: ...

class Arena(_message.Message):
    __slots__ = ("id", "tier", "device", "slot_align_bytes", "extent_bytes", "places", "device_uuid", "device_name")
    ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SLOT_ALIGN_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXTENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    id: int
    tier: _types_pb2.Tier
    device: str
    slot_align_bytes: int
    extent_bytes: int
    places: int
    device_uuid: bytes
    device_name: str
    def __init__(self, id: _Optional[int] = ..., tier: _Optional[_Union[_types_pb2.Tier, str]] = ..., device: _Optional[str] = ..., slot_align_bytes: _Optional[int] = ..., extent_bytes: _Optional[int] = ..., places: _Optional[int] = ..., device_uuid: _Optional[bytes] = ..., device_name: _Optional[str] = ...) -> None: ...

class ExtentsAdded(_message.Message):
    __slots__ = ("extents",)
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    extents: _containers.RepeatedCompositeFieldContainer[Extent]
    def __init__(self, extents: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ...) -> None: ...

class Extent(_message.Message):
    __slots__ = ("id", "arena", "bytes")
    ID_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    id: int
    arena: int
    bytes: int
    def __init__(self, id: _Optional[int] = ..., arena: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class Revocation(_message.Message):
    __slots__ = ("lease_ids", "reason")
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    reason: RevocationReason
    def __init__(self, lease_ids: _Optional[_Iterable[int]] = ..., reason: _Optional[_Union[RevocationReason, str]] = ...) -> None: ...

class Revoked(_message.Message):
    __slots__ = ("lease_ids",)
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Stopping(_message.Message):
    __slots__ = ("within",)
    WITHIN_FIELD_NUMBER: _ClassVar[int]
    within: _duration_pb2.Duration
    def __init__(self, within: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RegisterNamespaceRequest(_message.Message):
    __slots__ = ("layout", "salt", "prefill_tokens_per_second", "attachment")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    layout: _types_pb2.Layout
    salt: bytes
    prefill_tokens_per_second: float
    attachment: bytes
    def __init__(self, layout: _Optional[_Union[_types_pb2.Layout, _Mapping]] = ..., salt: _Optional[bytes] = ..., prefill_tokens_per_second: _Optional[float] = ..., attachment: _Optional[bytes] = ...) -> None: ...

class RegisterNamespaceResponse(_message.Message):
    __slots__ = ("namespace_id", "staging_extent", "staging_bytes")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    STAGING_EXTENT_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    staging_extent: int
    staging_bytes: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., staging_extent: _Optional[int] = ..., staging_bytes: _Optional[int] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("namespace_id", "block_names", "parts", "session_range")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NAMES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    SESSION_RANGE_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    block_names: bytes
    parts: int
    session_range: SessionRange
    def __init__(self, namespace_id: _Optional[bytes] = ..., block_names: _Optional[bytes] = ..., parts: _Optional[int] = ..., session_range: _Optional[_Union[SessionRange, _Mapping]] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("usable_blocks", "usable_tokens", "tiers")
    USABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USABLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    usable_blocks: int
    usable_tokens: int
    tiers: bytes
    def __init__(self, usable_blocks: _Optional[int] = ..., usable_tokens: _Optional[int] = ..., tiers: _Optional[bytes] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("attachment", "namespace_id", "block_names", "prefix_lease", "parts", "mode", "wanted_tier", "timeout", "lease_ttl", "for_group", "first_block", "session_range")
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NAMES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_LEASE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    WANTED_TIER_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_FIELD_NUMBER: _ClassVar[int]
    FOR_GROUP_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    SESSION_RANGE_FIELD_NUMBER: _ClassVar[int]
    attachment: bytes
    namespace_id: bytes
    block_names: bytes
    prefix_lease: int
    parts: int
    mode: FetchMode
    wanted_tier: _types_pb2.Tier
    timeout: _duration_pb2.Duration
    lease_ttl: _duration_pb2.Duration
    for_group: bool
    first_block: int
    session_range: SessionRange
    def __init__(self, attachment: _Optional[bytes] = ..., namespace_id: _Optional[bytes] = ..., block_names: _Optional[bytes] = ..., prefix_lease: _Optional[int] = ..., parts: _Optional[int] = ..., mode: _Optional[_Union[FetchMode, str]] = ..., wanted_tier: _Optional[_Union[_types_pb2.Tier, str]] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., lease_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., for_group: bool = ..., first_block: _Optional[int] = ..., session_range: _Optional[_Union[SessionRange, _Mapping]] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("lease_id", "usable_blocks", "usable_tokens", "slots", "tiers", "shortfalls", "adopt_token", "lease_ttl", "parts")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    USABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USABLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SHORTFALLS_FIELD_NUMBER: _ClassVar[int]
    ADOPT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    usable_blocks: int
    usable_tokens: int
    slots: bytes
    tiers: bytes
    shortfalls: _containers.RepeatedCompositeFieldContainer[Shortfall]
    adopt_token: bytes
    lease_ttl: _duration_pb2.Duration
    parts: int
    def __init__(self, lease_id: _Optional[int] = ..., usable_blocks: _Optional[int] = ..., usable_tokens: _Optional[int] = ..., slots: _Optional[bytes] = ..., tiers: _Optional[bytes] = ..., shortfalls: _Optional[_Iterable[_Union[Shortfall, _Mapping]]] = ..., adopt_token: _Optional[bytes] = ..., lease_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., parts: _Optional[int] = ...) -> None: ...

class Shortfall(_message.Message):
    __slots__ = ("block", "count", "reason", "retry_after")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_FIELD_NUMBER: _ClassVar[int]
    block: int
    count: int
    reason: _types_pb2.Reason
    retry_after: _duration_pb2.Duration
    def __init__(self, block: _Optional[int] = ..., count: _Optional[int] = ..., reason: _Optional[_Union[_types_pb2.Reason, str]] = ..., retry_after: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class AdoptRequest(_message.Message):
    __slots__ = ("attachment", "adopt_token", "parts")
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    ADOPT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    attachment: bytes
    adopt_token: bytes
    parts: int
    def __init__(self, attachment: _Optional[bytes] = ..., adopt_token: _Optional[bytes] = ..., parts: _Optional[int] = ...) -> None: ...

class AdoptResponse(_message.Message):
    __slots__ = ("lease_id", "usable_blocks", "slots", "parts")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    USABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    usable_blocks: int
    slots: bytes
    parts: int
    def __init__(self, lease_id: _Optional[int] = ..., usable_blocks: _Optional[int] = ..., slots: _Optional[bytes] = ..., parts: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("attachment", "lease_ids", "adopt_tokens")
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    ADOPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    attachment: bytes
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    adopt_tokens: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, attachment: _Optional[bytes] = ..., lease_ids: _Optional[_Iterable[int]] = ..., adopt_tokens: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("lost",)
    LOST_FIELD_NUMBER: _ClassVar[int]
    lost: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lost: _Optional[_Iterable[int]] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("attachment", "lease_ids", "lease_ttl")
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_FIELD_NUMBER: _ClassVar[int]
    attachment: bytes
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    lease_ttl: _duration_pb2.Duration
    def __init__(self, attachment: _Optional[bytes] = ..., lease_ids: _Optional[_Iterable[int]] = ..., lease_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("unknown",)
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    unknown: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, unknown: _Optional[_Iterable[int]] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("attachment", "namespace_id", "block_names", "first_block", "parts", "ttl", "timeout", "attempt", "tier", "region_id", "region_blocks")
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NAMES_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    REGION_ID_FIELD_NUMBER: _ClassVar[int]
    REGION_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    attachment: bytes
    namespace_id: bytes
    block_names: bytes
    first_block: int
    parts: int
    ttl: _duration_pb2.Duration
    timeout: _duration_pb2.Duration
    attempt: bytes
    tier: _types_pb2.Tier
    region_id: int
    region_blocks: bytes
    def __init__(self, attachment: _Optional[bytes] = ..., namespace_id: _Optional[bytes] = ..., block_names: _Optional[bytes] = ..., first_block: _Optional[int] = ..., parts: _Optional[int] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., attempt: _Optional[bytes] = ..., tier: _Optional[_Union[_types_pb2.Tier, str]] = ..., region_id: _Optional[int] = ..., region_blocks: _Optional[bytes] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("attempt", "outcomes", "slots", "in_flight_for", "parts")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FOR_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    attempt: bytes
    outcomes: bytes
    slots: bytes
    in_flight_for: _duration_pb2.Duration
    parts: int
    def __init__(self, attempt: _Optional[bytes] = ..., outcomes: _Optional[bytes] = ..., slots: _Optional[bytes] = ..., in_flight_for: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., parts: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("attachment", "attempt", "rows", "durable", "retention")
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    attachment: bytes
    attempt: bytes
    rows: bytes
    durable: bool
    retention: Retention
    def __init__(self, attachment: _Optional[bytes] = ..., attempt: _Optional[bytes] = ..., rows: _Optional[bytes] = ..., durable: bool = ..., retention: _Optional[_Union[Retention, _Mapping]] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    def __init__(self, outcomes: _Optional[bytes] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("attachment", "attempt")
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    attachment: bytes
    attempt: bytes
    def __init__(self, attachment: _Optional[bytes] = ..., attempt: _Optional[bytes] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("attachment", "namespace_id", "block_names", "parts", "tier", "priority", "timeout", "session_range", "first_block")
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NAMES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    SESSION_RANGE_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    attachment: bytes
    namespace_id: bytes
    block_names: bytes
    parts: int
    tier: _types_pb2.Tier
    priority: int
    timeout: _duration_pb2.Duration
    session_range: SessionRange
    first_block: int
    def __init__(self, attachment: _Optional[bytes] = ..., namespace_id: _Optional[bytes] = ..., block_names: _Optional[bytes] = ..., parts: _Optional[int] = ..., tier: _Optional[_Union[_types_pb2.Tier, str]] = ..., priority: _Optional[int] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., session_range: _Optional[_Union[SessionRange, _Mapping]] = ..., first_block: _Optional[int] = ...) -> None: ...

class PrefetchResponse(_message.Message):
    __slots__ = ("ticket", "admitted_blocks", "refused_blocks")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    admitted_blocks: int
    refused_blocks: int
    def __init__(self, ticket: _Optional[int] = ..., admitted_blocks: _Optional[int] = ..., refused_blocks: _Optional[int] = ...) -> None: ...

class PrefetchProgress(_message.Message):
    __slots__ = ("ticket", "ready", "done", "reason")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    ready: bytes
    done: bool
    reason: _types_pb2.Reason
    def __init__(self, ticket: _Optional[int] = ..., ready: _Optional[bytes] = ..., done: bool = ..., reason: _Optional[_Union[_types_pb2.Reason, str]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("attachment", "ticket")
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    attachment: bytes
    ticket: int
    def __init__(self, attachment: _Optional[bytes] = ..., ticket: _Optional[int] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Retention(_message.Message):
    __slots__ = ("priority", "ttl", "refresh_on_hit")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    REFRESH_ON_HIT_FIELD_NUMBER: _ClassVar[int]
    priority: int
    ttl: _duration_pb2.Duration
    refresh_on_hit: bool
    def __init__(self, priority: _Optional[int] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., refresh_on_hit: bool = ...) -> None: ...

class RetainRequest(_message.Message):
    __slots__ = ("namespace_id", "block_names", "retention", "session_range")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NAMES_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    SESSION_RANGE_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    block_names: bytes
    retention: Retention
    session_range: SessionRange
    def __init__(self, namespace_id: _Optional[bytes] = ..., block_names: _Optional[bytes] = ..., retention: _Optional[_Union[Retention, _Mapping]] = ..., session_range: _Optional[_Union[SessionRange, _Mapping]] = ...) -> None: ...

class RetainResponse(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    def __init__(self, outcomes: _Optional[bytes] = ...) -> None: ...

class DemoteRequest(_message.Message):
    __slots__ = ("namespace_id", "block_names", "session_range")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NAMES_FIELD_NUMBER: _ClassVar[int]
    FROM_FIELD_NUMBER: _ClassVar[int]
    SESSION_RANGE_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    block_names: bytes
    session_range: SessionRange
    def __init__(self, namespace_id: _Optional[bytes] = ..., block_names: _Optional[bytes] = ..., session_range: _Optional[_Union[SessionRange, _Mapping]] = ..., **kwargs) -> None: ...

class DemoteResponse(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    def __init__(self, outcomes: _Optional[bytes] = ...) -> None: ...

class DropRequest(_message.Message):
    __slots__ = ("namespace_id", "block_names", "session_range")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NAMES_FIELD_NUMBER: _ClassVar[int]
    SESSION_RANGE_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    block_names: bytes
    session_range: SessionRange
    def __init__(self, namespace_id: _Optional[bytes] = ..., block_names: _Optional[bytes] = ..., session_range: _Optional[_Union[SessionRange, _Mapping]] = ...) -> None: ...

class DropResponse(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    def __init__(self, outcomes: _Optional[bytes] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("namespace_id", "block_names", "ttl", "session_range")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NAMES_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    SESSION_RANGE_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    block_names: bytes
    ttl: _duration_pb2.Duration
    session_range: SessionRange
    def __init__(self, namespace_id: _Optional[bytes] = ..., block_names: _Optional[bytes] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., session_range: _Optional[_Union[SessionRange, _Mapping]] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    def __init__(self, outcomes: _Optional[bytes] = ...) -> None: ...

class ReadPagesRequest(_message.Message):
    __slots__ = ("namespace_id", "block_names", "parts", "mode", "first_block", "session_range")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NAMES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    SESSION_RANGE_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    block_names: bytes
    parts: int
    mode: FetchMode
    first_block: int
    session_range: SessionRange
    def __init__(self, namespace_id: _Optional[bytes] = ..., block_names: _Optional[bytes] = ..., parts: _Optional[int] = ..., mode: _Optional[_Union[FetchMode, str]] = ..., first_block: _Optional[int] = ..., session_range: _Optional[_Union[SessionRange, _Mapping]] = ...) -> None: ...

class ReadPagesResponse(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: ReadPagesHeader
    chunk: PageChunk
    def __init__(self, header: _Optional[_Union[ReadPagesHeader, _Mapping]] = ..., chunk: _Optional[_Union[PageChunk, _Mapping]] = ...) -> None: ...

class ReadPagesHeader(_message.Message):
    __slots__ = ("usable_blocks", "usable_tokens", "tiers", "shortfalls", "parts")
    USABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USABLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SHORTFALLS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    usable_blocks: int
    usable_tokens: int
    tiers: bytes
    shortfalls: _containers.RepeatedCompositeFieldContainer[Shortfall]
    parts: int
    def __init__(self, usable_blocks: _Optional[int] = ..., usable_tokens: _Optional[int] = ..., tiers: _Optional[bytes] = ..., shortfalls: _Optional[_Iterable[_Union[Shortfall, _Mapping]]] = ..., parts: _Optional[int] = ...) -> None: ...

class PageChunk(_message.Message):
    __slots__ = ("block", "part", "offset", "data", "page_bytes", "checksum")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    block: int
    part: int
    offset: int
    data: bytes
    page_bytes: int
    checksum: int
    def __init__(self, block: _Optional[int] = ..., part: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., page_bytes: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class WritePagesRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: WritePagesHeader
    chunk: PageChunk
    def __init__(self, header: _Optional[_Union[WritePagesHeader, _Mapping]] = ..., chunk: _Optional[_Union[PageChunk, _Mapping]] = ...) -> None: ...

class WritePagesHeader(_message.Message):
    __slots__ = ("namespace_id", "block_names", "first_block", "parts", "durable", "retention")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NAMES_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    block_names: bytes
    first_block: int
    parts: int
    durable: bool
    retention: Retention
    def __init__(self, namespace_id: _Optional[bytes] = ..., block_names: _Optional[bytes] = ..., first_block: _Optional[int] = ..., parts: _Optional[int] = ..., durable: bool = ..., retention: _Optional[_Union[Retention, _Mapping]] = ...) -> None: ...

class WritePagesResponse(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    def __init__(self, outcomes: _Optional[bytes] = ...) -> None: ...

class RegisterRegionRequest(_message.Message):
    __slots__ = ("attachment", "handle", "namespace_id", "blocks", "parts")
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    attachment: bytes
    handle: int
    namespace_id: bytes
    blocks: int
    parts: _containers.RepeatedCompositeFieldContainer[RegionPart]
    def __init__(self, attachment: _Optional[bytes] = ..., handle: _Optional[int] = ..., namespace_id: _Optional[bytes] = ..., blocks: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[RegionPart, _Mapping]]] = ...) -> None: ...

class RegionPart(_message.Message):
    __slots__ = ("part", "offset", "block_stride", "pieces", "piece_stride")
    PART_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STRIDE_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    PIECE_STRIDE_FIELD_NUMBER: _ClassVar[int]
    part: int
    offset: int
    block_stride: int
    pieces: int
    piece_stride: int
    def __init__(self, part: _Optional[int] = ..., offset: _Optional[int] = ..., block_stride: _Optional[int] = ..., pieces: _Optional[int] = ..., piece_stride: _Optional[int] = ...) -> None: ...

class RegisterRegionResponse(_message.Message):
    __slots__ = ("region_id",)
    REGION_ID_FIELD_NUMBER: _ClassVar[int]
    region_id: int
    def __init__(self, region_id: _Optional[int] = ...) -> None: ...

class DropRegionRequest(_message.Message):
    __slots__ = ("attachment", "region_id")
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    REGION_ID_FIELD_NUMBER: _ClassVar[int]
    attachment: bytes
    region_id: int
    def __init__(self, attachment: _Optional[bytes] = ..., region_id: _Optional[int] = ...) -> None: ...

class DropRegionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FetchIntoRequest(_message.Message):
    __slots__ = ("attachment", "namespace_id", "block_names", "first_block", "parts", "region_id", "region_blocks", "timeout", "session_range")
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NAMES_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    REGION_ID_FIELD_NUMBER: _ClassVar[int]
    REGION_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    SESSION_RANGE_FIELD_NUMBER: _ClassVar[int]
    attachment: bytes
    namespace_id: bytes
    block_names: bytes
    first_block: int
    parts: int
    region_id: int
    region_blocks: bytes
    timeout: _duration_pb2.Duration
    session_range: SessionRange
    def __init__(self, attachment: _Optional[bytes] = ..., namespace_id: _Optional[bytes] = ..., block_names: _Optional[bytes] = ..., first_block: _Optional[int] = ..., parts: _Optional[int] = ..., region_id: _Optional[int] = ..., region_blocks: _Optional[bytes] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., session_range: _Optional[_Union[SessionRange, _Mapping]] = ...) -> None: ...

class FetchIntoResponse(_message.Message):
    __slots__ = ("usable_blocks", "usable_tokens", "tiers", "shortfalls")
    USABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USABLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SHORTFALLS_FIELD_NUMBER: _ClassVar[int]
    usable_blocks: int
    usable_tokens: int
    tiers: bytes
    shortfalls: _containers.RepeatedCompositeFieldContainer[Shortfall]
    def __init__(self, usable_blocks: _Optional[int] = ..., usable_tokens: _Optional[int] = ..., tiers: _Optional[bytes] = ..., shortfalls: _Optional[_Iterable[_Union[Shortfall, _Mapping]]] = ...) -> None: ...
