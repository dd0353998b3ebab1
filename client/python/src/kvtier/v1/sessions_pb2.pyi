import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from kvtier.v1 import directory_pb2 as _directory_pb2
from kvtier.v1 import pages_pb2 as _pages_pb2
from kvtier.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Elsewhere(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ELSEWHERE_UNSPECIFIED: _ClassVar[Elsewhere]
    ELSEWHERE_REFUSE: _ClassVar[Elsewhere]
    ELSEWHERE_BRING: _ClassVar[Elsewhere]
ELSEWHERE_UNSPECIFIED: Elsewhere
ELSEWHERE_REFUSE: Elsewhere
ELSEWHERE_BRING: Elsewhere

class SessionInfo(_message.Message):
    __slots__ = ("session", "tenant", "namespace_id", "model", "owner", "owner_name", "owner_address", "epoch", "state", "target", "target_name", "blocks", "tokens", "retention", "idle", "opened", "parent", "moves", "owner_up", "second_name", "at_owner", "absent_blocks")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    OWNER_NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    TARGET_NAME_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    OWNER_UP_FIELD_NUMBER: _ClassVar[int]
    SECOND_NAME_FIELD_NUMBER: _ClassVar[int]
    AT_OWNER_FIELD_NUMBER: _ClassVar[int]
    ABSENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    session: str
    tenant: str
    namespace_id: bytes
    model: str
    owner: bytes
    owner_name: str
    owner_address: str
    epoch: int
    state: _directory_pb2.SessionState
    target: bytes
    target_name: str
    blocks: int
    tokens: int
    retention: _pages_pb2.Retention
    idle: _duration_pb2.Duration
    opened: _timestamp_pb2.Timestamp
    parent: str
    moves: int
    owner_up: bool
    second_name: str
    at_owner: _containers.RepeatedCompositeFieldContainer[TierAmount]
    absent_blocks: int
    def __init__(self, session: _Optional[str] = ..., tenant: _Optional[str] = ..., namespace_id: _Optional[bytes] = ..., model: _Optional[str] = ..., owner: _Optional[bytes] = ..., owner_name: _Optional[str] = ..., owner_address: _Optional[str] = ..., epoch: _Optional[int] = ..., state: _Optional[_Union[_directory_pb2.SessionState, str]] = ..., target: _Optional[bytes] = ..., target_name: _Optional[str] = ..., blocks: _Optional[int] = ..., tokens: _Optional[int] = ..., retention: _Optional[_Union[_pages_pb2.Retention, _Mapping]] = ..., idle: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., opened: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., parent: _Optional[str] = ..., moves: _Optional[int] = ..., owner_up: bool = ..., second_name: _Optional[str] = ..., at_owner: _Optional[_Iterable[_Union[TierAmount, _Mapping]]] = ..., absent_blocks: _Optional[int] = ...) -> None: ...

class TierAmount(_message.Message):
    __slots__ = ("tier", "blocks", "bytes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    tier: _types_pb2.Tier
    blocks: int
    bytes: int
    def __init__(self, tier: _Optional[_Union[_types_pb2.Tier, str]] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("session", "tenant", "namespace_id", "retention", "block_names", "elsewhere", "attachment")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NAMES_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    session: str
    tenant: str
    namespace_id: bytes
    retention: _pages_pb2.Retention
    block_names: bytes
    elsewhere: Elsewhere
    attachment: bytes
    def __init__(self, session: _Optional[str] = ..., tenant: _Optional[str] = ..., namespace_id: _Optional[bytes] = ..., retention: _Optional[_Union[_pages_pb2.Retention, _Mapping]] = ..., block_names: _Optional[bytes] = ..., elsewhere: _Optional[_Union[Elsewhere, str]] = ..., attachment: _Optional[bytes] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("session", "taken_over", "lost_blocks")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TAKEN_OVER_FIELD_NUMBER: _ClassVar[int]
    LOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    session: SessionInfo
    taken_over: bool
    lost_blocks: int
    def __init__(self, session: _Optional[_Union[SessionInfo, _Mapping]] = ..., taken_over: bool = ..., lost_blocks: _Optional[int] = ...) -> None: ...

class AppendSessionRequest(_message.Message):
    __slots__ = ("session", "tenant", "first_block", "block_names", "epoch")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NAMES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    session: str
    tenant: str
    first_block: int
    block_names: bytes
    epoch: int
    def __init__(self, session: _Optional[str] = ..., tenant: _Optional[str] = ..., first_block: _Optional[int] = ..., block_names: _Optional[bytes] = ..., epoch: _Optional[int] = ...) -> None: ...

class AppendSessionResponse(_message.Message):
    __slots__ = ("blocks", "tokens", "epoch")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    tokens: int
    epoch: int
    def __init__(self, blocks: _Optional[int] = ..., tokens: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ("session", "tenant", "from_block", "to_block", "usage", "placement")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FROM_BLOCK_FIELD_NUMBER: _ClassVar[int]
    TO_BLOCK_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    session: str
    tenant: str
    from_block: int
    to_block: int
    usage: bool
    placement: bool
    def __init__(self, session: _Optional[str] = ..., tenant: _Optional[str] = ..., from_block: _Optional[int] = ..., to_block: _Optional[int] = ..., usage: bool = ..., placement: bool = ...) -> None: ...

class GetSessionResponse(_message.Message):
    __slots__ = ("session", "block_names", "runs")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NAMES_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    session: SessionInfo
    block_names: bytes
    runs: _containers.RepeatedCompositeFieldContainer[SessionRun]
    def __init__(self, session: _Optional[_Union[SessionInfo, _Mapping]] = ..., block_names: _Optional[bytes] = ..., runs: _Optional[_Iterable[_Union[SessionRun, _Mapping]]] = ...) -> None: ...

class SessionRun(_message.Message):
    __slots__ = ("first_block", "blocks", "places")
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    first_block: int
    blocks: int
    places: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, first_block: _Optional[int] = ..., blocks: _Optional[int] = ..., places: _Optional[_Iterable[str]] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("tenant", "node", "state", "idle", "usage", "page_size", "page_token")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    node: str
    state: _directory_pb2.SessionState
    idle: _duration_pb2.Duration
    usage: bool
    page_size: int
    page_token: str
    def __init__(self, tenant: _Optional[str] = ..., node: _Optional[str] = ..., state: _Optional[_Union[_directory_pb2.SessionState, str]] = ..., idle: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., usage: bool = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions", "next_page_token")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionInfo]
    next_page_token: str
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ShareSessionRequest(_message.Message):
    __slots__ = ("session", "tenant", "fork", "blocks", "retention")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    session: str
    tenant: str
    fork: str
    blocks: int
    retention: _pages_pb2.Retention
    def __init__(self, session: _Optional[str] = ..., tenant: _Optional[str] = ..., fork: _Optional[str] = ..., blocks: _Optional[int] = ..., retention: _Optional[_Union[_pages_pb2.Retention, _Mapping]] = ...) -> None: ...

class ShareSessionResponse(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: SessionInfo
    def __init__(self, session: _Optional[_Union[SessionInfo, _Mapping]] = ...) -> None: ...

class RetainSessionRequest(_message.Message):
    __slots__ = ("session", "tenant", "retention")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    session: str
    tenant: str
    retention: _pages_pb2.Retention
    def __init__(self, session: _Optional[str] = ..., tenant: _Optional[str] = ..., retention: _Optional[_Union[_pages_pb2.Retention, _Mapping]] = ...) -> None: ...

class RetainSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session", "tenant")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    session: str
    tenant: str
    def __init__(self, session: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchSessionsRequest(_message.Message):
    __slots__ = ("sessions", "tenant")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedScalarFieldContainer[str]
    tenant: str
    def __init__(self, sessions: _Optional[_Iterable[str]] = ..., tenant: _Optional[str] = ...) -> None: ...

class WatchSessionsResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: _pages_pb2.SessionEvent
    def __init__(self, event: _Optional[_Union[_pages_pb2.SessionEvent, _Mapping]] = ...) -> None: ...

class MigrateSessionRequest(_message.Message):
    __slots__ = ("session", "tenant", "to", "dry_run", "max_bytes_per_second", "deadline", "tier")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    session: str
    tenant: str
    to: str
    dry_run: bool
    max_bytes_per_second: int
    deadline: _duration_pb2.Duration
    tier: _types_pb2.Tier
    def __init__(self, session: _Optional[str] = ..., tenant: _Optional[str] = ..., to: _Optional[str] = ..., dry_run: bool = ..., max_bytes_per_second: _Optional[int] = ..., deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., tier: _Optional[_Union[_types_pb2.Tier, str]] = ...) -> None: ...

class MigrateSessionResponse(_message.Message):
    __slots__ = ("plan", "progress")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    plan: MovePlan
    progress: MoveProgress
    def __init__(self, plan: _Optional[_Union[MovePlan, _Mapping]] = ..., progress: _Optional[_Union[MoveProgress, _Mapping]] = ...) -> None: ...

class MovePlan(_message.Message):
    __slots__ = ("session", "target_name", "lacking_blocks", "lacking_bytes", "lacking_tokens", "nowhere_blocks", "copy_time", "recompute_time", "recompute_is_cheaper")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TARGET_NAME_FIELD_NUMBER: _ClassVar[int]
    LACKING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LACKING_BYTES_FIELD_NUMBER: _ClassVar[int]
    LACKING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NOWHERE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COPY_TIME_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_TIME_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_IS_CHEAPER_FIELD_NUMBER: _ClassVar[int]
    session: SessionInfo
    target_name: str
    lacking_blocks: int
    lacking_bytes: int
    lacking_tokens: int
    nowhere_blocks: int
    copy_time: _duration_pb2.Duration
    recompute_time: _duration_pb2.Duration
    recompute_is_cheaper: bool
    def __init__(self, session: _Optional[_Union[SessionInfo, _Mapping]] = ..., target_name: _Optional[str] = ..., lacking_blocks: _Optional[int] = ..., lacking_bytes: _Optional[int] = ..., lacking_tokens: _Optional[int] = ..., nowhere_blocks: _Optional[int] = ..., copy_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., recompute_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., recompute_is_cheaper: bool = ...) -> None: ...

class MoveProgress(_message.Message):
    __slots__ = ("state", "ended", "round", "lacked_bytes", "sent_bytes", "left_bytes", "bytes_per_second", "left", "pause", "nowhere_blocks", "why", "owner", "epoch")
    STATE_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LACKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEFT_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    NOWHERE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    state: str
    ended: bool
    round: int
    lacked_bytes: int
    sent_bytes: int
    left_bytes: int
    bytes_per_second: int
    left: _duration_pb2.Duration
    pause: _duration_pb2.Duration
    nowhere_blocks: int
    why: str
    owner: bytes
    epoch: int
    def __init__(self, state: _Optional[str] = ..., ended: bool = ..., round: _Optional[int] = ..., lacked_bytes: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., left_bytes: _Optional[int] = ..., bytes_per_second: _Optional[int] = ..., left: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., pause: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., nowhere_blocks: _Optional[int] = ..., why: _Optional[str] = ..., owner: _Optional[bytes] = ..., epoch: _Optional[int] = ...) -> None: ...

class CancelMigrationRequest(_message.Message):
    __slots__ = ("session", "tenant")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    session: str
    tenant: str
    def __init__(self, session: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class CancelMigrationResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
