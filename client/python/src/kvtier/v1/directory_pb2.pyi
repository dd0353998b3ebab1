from kvtier.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_STATE_UNSPECIFIED: _ClassVar[NodeState]
    NODE_STATE_UP: _ClassVar[NodeState]
    NODE_STATE_DOWN: _ClassVar[NodeState]
    NODE_STATE_DRAINING: _ClassVar[NodeState]
    NODE_STATE_LEFT: _ClassVar[NodeState]

class SessionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_STATE_UNSPECIFIED: _ClassVar[SessionState]
    SESSION_STATE_ACTIVE: _ClassVar[SessionState]
    SESSION_STATE_MIGRATING: _ClassVar[SessionState]
    SESSION_STATE_FROZEN: _ClassVar[SessionState]

class DirectoryResult(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DIRECTORY_RESULT_UNSPECIFIED: _ClassVar[DirectoryResult]
    DIRECTORY_RESULT_OK: _ClassVar[DirectoryResult]
    DIRECTORY_RESULT_STALE: _ClassVar[DirectoryResult]
    DIRECTORY_RESULT_GAP: _ClassVar[DirectoryResult]
    DIRECTORY_RESULT_UNKNOWN: _ClassVar[DirectoryResult]
    DIRECTORY_RESULT_FULL: _ClassVar[DirectoryResult]
    DIRECTORY_RESULT_INVALID: _ClassVar[DirectoryResult]
    DIRECTORY_RESULT_FROZEN: _ClassVar[DirectoryResult]
    DIRECTORY_RESULT_NOT_OWNER: _ClassVar[DirectoryResult]
    DIRECTORY_RESULT_OWNER_ALIVE: _ClassVar[DirectoryResult]
NODE_STATE_UNSPECIFIED: NodeState
NODE_STATE_UP: NodeState
NODE_STATE_DOWN: NodeState
NODE_STATE_DRAINING: NodeState
NODE_STATE_LEFT: NodeState
SESSION_STATE_UNSPECIFIED: SessionState
SESSION_STATE_ACTIVE: SessionState
SESSION_STATE_MIGRATING: SessionState
SESSION_STATE_FROZEN: SessionState
DIRECTORY_RESULT_UNSPECIFIED: DirectoryResult
DIRECTORY_RESULT_OK: DirectoryResult
DIRECTORY_RESULT_STALE: DirectoryResult
DIRECTORY_RESULT_GAP: DirectoryResult
DIRECTORY_RESULT_UNKNOWN: DirectoryResult
DIRECTORY_RESULT_FULL: DirectoryResult
DIRECTORY_RESULT_INVALID: DirectoryResult
DIRECTORY_RESULT_FROZEN: DirectoryResult
DIRECTORY_RESULT_NOT_OWNER: DirectoryResult
DIRECTORY_RESULT_OWNER_ALIVE: DirectoryResult

class DirectoryCommand(_message.Message):
    __slots__ = ("request_id", "now_unix_ms", "max_claims", "join_node", "set_node_state", "remove_node", "put_namespace", "remove_namespace", "claim_batch", "claim_repair", "drop_claims", "tick", "session", "expire_sessions")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NOW_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_CLAIMS_FIELD_NUMBER: _ClassVar[int]
    JOIN_NODE_FIELD_NUMBER: _ClassVar[int]
    SET_NODE_STATE_FIELD_NUMBER: _ClassVar[int]
    REMOVE_NODE_FIELD_NUMBER: _ClassVar[int]
    PUT_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    REMOVE_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CLAIM_BATCH_FIELD_NUMBER: _ClassVar[int]
    CLAIM_REPAIR_FIELD_NUMBER: _ClassVar[int]
    DROP_CLAIMS_FIELD_NUMBER: _ClassVar[int]
    TICK_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    now_unix_ms: int
    max_claims: int
    join_node: JoinNode
    set_node_state: SetNodeState
    remove_node: RemoveNode
    put_namespace: PutNamespace
    remove_namespace: RemoveNamespace
    claim_batch: ClaimBatch
    claim_repair: ClaimRepair
    drop_claims: DropClaims
    tick: Tick
    session: SessionCommand
    expire_sessions: ExpireSessions
    def __init__(self, request_id: _Optional[bytes] = ..., now_unix_ms: _Optional[int] = ..., max_claims: _Optional[int] = ..., join_node: _Optional[_Union[JoinNode, _Mapping]] = ..., set_node_state: _Optional[_Union[SetNodeState, _Mapping]] = ..., remove_node: _Optional[_Union[RemoveNode, _Mapping]] = ..., put_namespace: _Optional[_Union[PutNamespace, _Mapping]] = ..., remove_namespace: _Optional[_Union[RemoveNamespace, _Mapping]] = ..., claim_batch: _Optional[_Union[ClaimBatch, _Mapping]] = ..., claim_repair: _Optional[_Union[ClaimRepair, _Mapping]] = ..., drop_claims: _Optional[_Union[DropClaims, _Mapping]] = ..., tick: _Optional[_Union[Tick, _Mapping]] = ..., session: _Optional[_Union[SessionCommand, _Mapping]] = ..., expire_sessions: _Optional[_Union[ExpireSessions, _Mapping]] = ...) -> None: ...

class Tick(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class JoinNode(_message.Message):
    __slots__ = ("node", "incarnation", "name", "peer_address", "rpc_address", "capacity")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PEER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    node: bytes
    incarnation: int
    name: str
    peer_address: str
    rpc_address: str
    capacity: _containers.RepeatedCompositeFieldContainer[TierCapacity]
    def __init__(self, node: _Optional[bytes] = ..., incarnation: _Optional[int] = ..., name: _Optional[str] = ..., peer_address: _Optional[str] = ..., rpc_address: _Optional[str] = ..., capacity: _Optional[_Iterable[_Union[TierCapacity, _Mapping]]] = ...) -> None: ...

class TierCapacity(_message.Message):
    __slots__ = ("tier", "bytes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    tier: _types_pb2.Tier
    bytes: int
    def __init__(self, tier: _Optional[_Union[_types_pb2.Tier, str]] = ..., bytes: _Optional[int] = ...) -> None: ...

class SetNodeState(_message.Message):
    __slots__ = ("node", "incarnation", "state")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    node: bytes
    incarnation: int
    state: NodeState
    def __init__(self, node: _Optional[bytes] = ..., incarnation: _Optional[int] = ..., state: _Optional[_Union[NodeState, str]] = ...) -> None: ...

class RemoveNode(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: bytes
    def __init__(self, node: _Optional[bytes] = ...) -> None: ...

class PutNamespace(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    def __init__(self, namespace: _Optional[bytes] = ...) -> None: ...

class RemoveNamespace(_message.Message):
    __slots__ = ("namespace_id", "put_before_unix_ms")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    PUT_BEFORE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    put_before_unix_ms: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., put_before_unix_ms: _Optional[int] = ...) -> None: ...

class ClaimBatch(_message.Message):
    __slots__ = ("node", "incarnation", "sequence", "changes")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    node: bytes
    incarnation: int
    sequence: int
    changes: bytes
    def __init__(self, node: _Optional[bytes] = ..., incarnation: _Optional[int] = ..., sequence: _Optional[int] = ..., changes: _Optional[bytes] = ...) -> None: ...

class ClaimRepair(_message.Message):
    __slots__ = ("node", "incarnation", "sequence", "buckets", "claims", "resets_sequence")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    RESETS_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    node: bytes
    incarnation: int
    sequence: int
    buckets: bytes
    claims: bytes
    resets_sequence: bool
    def __init__(self, node: _Optional[bytes] = ..., incarnation: _Optional[int] = ..., sequence: _Optional[int] = ..., buckets: _Optional[bytes] = ..., claims: _Optional[bytes] = ..., resets_sequence: bool = ...) -> None: ...

class DropClaims(_message.Message):
    __slots__ = ("node", "incarnation", "from_shard", "to_shard")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FROM_SHARD_FIELD_NUMBER: _ClassVar[int]
    TO_SHARD_FIELD_NUMBER: _ClassVar[int]
    node: bytes
    incarnation: int
    from_shard: int
    to_shard: int
    def __init__(self, node: _Optional[bytes] = ..., incarnation: _Optional[int] = ..., from_shard: _Optional[int] = ..., to_shard: _Optional[int] = ...) -> None: ...

class SessionCommand(_message.Message):
    __slots__ = ("session", "node", "epoch", "open", "append", "close", "retain", "prepare", "freeze", "commit", "abort", "take_over")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    APPEND_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    RETAIN_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    FREEZE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    TAKE_OVER_FIELD_NUMBER: _ClassVar[int]
    session: str
    node: bytes
    epoch: int
    open: OpenSession
    append: AppendSession
    close: CloseSession
    retain: RetainSession
    prepare: PrepareMove
    freeze: FreezeMove
    commit: CommitMove
    abort: AbortMove
    take_over: TakeOver
    def __init__(self, session: _Optional[str] = ..., node: _Optional[bytes] = ..., epoch: _Optional[int] = ..., open: _Optional[_Union[OpenSession, _Mapping]] = ..., append: _Optional[_Union[AppendSession, _Mapping]] = ..., close: _Optional[_Union[CloseSession, _Mapping]] = ..., retain: _Optional[_Union[RetainSession, _Mapping]] = ..., prepare: _Optional[_Union[PrepareMove, _Mapping]] = ..., freeze: _Optional[_Union[FreezeMove, _Mapping]] = ..., commit: _Optional[_Union[CommitMove, _Mapping]] = ..., abort: _Optional[_Union[AbortMove, _Mapping]] = ..., take_over: _Optional[_Union[TakeOver, _Mapping]] = ...) -> None: ...

class OpenSession(_message.Message):
    __slots__ = ("namespace_id", "retention", "parent", "chain", "max_sessions")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    retention: RetainSession
    parent: str
    chain: SessionChain
    max_sessions: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., retention: _Optional[_Union[RetainSession, _Mapping]] = ..., parent: _Optional[str] = ..., chain: _Optional[_Union[SessionChain, _Mapping]] = ..., max_sessions: _Optional[int] = ...) -> None: ...

class SessionChain(_message.Message):
    __slots__ = ("blocks", "tokens", "tip", "hash", "segment_hash")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIP_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_HASH_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    tokens: int
    tip: bytes
    hash: bytes
    segment_hash: bytes
    def __init__(self, blocks: _Optional[int] = ..., tokens: _Optional[int] = ..., tip: _Optional[bytes] = ..., hash: _Optional[bytes] = ..., segment_hash: _Optional[bytes] = ...) -> None: ...

class AppendSession(_message.Message):
    __slots__ = ("sequence", "chain", "second")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    SECOND_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    chain: SessionChain
    second: bytes
    def __init__(self, sequence: _Optional[int] = ..., chain: _Optional[_Union[SessionChain, _Mapping]] = ..., second: _Optional[bytes] = ...) -> None: ...

class CloseSession(_message.Message):
    __slots__ = ("forced",)
    FORCED_FIELD_NUMBER: _ClassVar[int]
    forced: bool
    def __init__(self, forced: bool = ...) -> None: ...

class RetainSession(_message.Message):
    __slots__ = ("priority", "ttl_ms", "refresh")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    REFRESH_FIELD_NUMBER: _ClassVar[int]
    priority: int
    ttl_ms: int
    refresh: bool
    def __init__(self, priority: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., refresh: bool = ...) -> None: ...

class PrepareMove(_message.Message):
    __slots__ = ("move", "target")
    MOVE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    move: bytes
    target: bytes
    def __init__(self, move: _Optional[bytes] = ..., target: _Optional[bytes] = ...) -> None: ...

class FreezeMove(_message.Message):
    __slots__ = ("move",)
    MOVE_FIELD_NUMBER: _ClassVar[int]
    move: bytes
    def __init__(self, move: _Optional[bytes] = ...) -> None: ...

class CommitMove(_message.Message):
    __slots__ = ("move",)
    MOVE_FIELD_NUMBER: _ClassVar[int]
    move: bytes
    def __init__(self, move: _Optional[bytes] = ...) -> None: ...

class AbortMove(_message.Message):
    __slots__ = ("move",)
    MOVE_FIELD_NUMBER: _ClassVar[int]
    move: bytes
    def __init__(self, move: _Optional[bytes] = ...) -> None: ...

class TakeOver(_message.Message):
    __slots__ = ("chain",)
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    chain: SessionChain
    def __init__(self, chain: _Optional[_Union[SessionChain, _Mapping]] = ...) -> None: ...

class ExpireSessions(_message.Message):
    __slots__ = ("sessions", "used_unix_ms")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    USED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedScalarFieldContainer[str]
    used_unix_ms: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sessions: _Optional[_Iterable[str]] = ..., used_unix_ms: _Optional[_Iterable[int]] = ...) -> None: ...

class SessionRecord(_message.Message):
    __slots__ = ("session", "namespace_id", "owner", "epoch", "sequence", "state", "chain", "retention", "used_unix_ms", "move", "target", "second", "parent", "opened_unix_ms", "moves")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    USED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    SECOND_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    OPENED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    session: str
    namespace_id: bytes
    owner: bytes
    epoch: int
    sequence: int
    state: SessionState
    chain: SessionChain
    retention: RetainSession
    used_unix_ms: int
    move: bytes
    target: bytes
    second: bytes
    parent: str
    opened_unix_ms: int
    moves: int
    def __init__(self, session: _Optional[str] = ..., namespace_id: _Optional[bytes] = ..., owner: _Optional[bytes] = ..., epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., state: _Optional[_Union[SessionState, str]] = ..., chain: _Optional[_Union[SessionChain, _Mapping]] = ..., retention: _Optional[_Union[RetainSession, _Mapping]] = ..., used_unix_ms: _Optional[int] = ..., move: _Optional[bytes] = ..., target: _Optional[bytes] = ..., second: _Optional[bytes] = ..., parent: _Optional[str] = ..., opened_unix_ms: _Optional[int] = ..., moves: _Optional[int] = ...) -> None: ...

class DirectoryRecord(_message.Message):
    __slots__ = ("header", "node", "namespace", "claims", "requests", "end", "session")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    header: SnapshotHeader
    node: NodeRecord
    namespace: NamespaceRecord
    claims: ClaimsRecord
    requests: RequestsRecord
    end: SnapshotEnd
    session: SessionRecord
    def __init__(self, header: _Optional[_Union[SnapshotHeader, _Mapping]] = ..., node: _Optional[_Union[NodeRecord, _Mapping]] = ..., namespace: _Optional[_Union[NamespaceRecord, _Mapping]] = ..., claims: _Optional[_Union[ClaimsRecord, _Mapping]] = ..., requests: _Optional[_Union[RequestsRecord, _Mapping]] = ..., end: _Optional[_Union[SnapshotEnd, _Mapping]] = ..., session: _Optional[_Union[SessionRecord, _Mapping]] = ...) -> None: ...

class SnapshotHeader(_message.Message):
    __slots__ = ("version", "now_unix_ms", "applied", "log_index", "log_term", "max_claims")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NOW_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    LOG_INDEX_FIELD_NUMBER: _ClassVar[int]
    LOG_TERM_FIELD_NUMBER: _ClassVar[int]
    MAX_CLAIMS_FIELD_NUMBER: _ClassVar[int]
    version: int
    now_unix_ms: int
    applied: int
    log_index: int
    log_term: int
    max_claims: int
    def __init__(self, version: _Optional[int] = ..., now_unix_ms: _Optional[int] = ..., applied: _Optional[int] = ..., log_index: _Optional[int] = ..., log_term: _Optional[int] = ..., max_claims: _Optional[int] = ...) -> None: ...

class NodeRecord(_message.Message):
    __slots__ = ("joined", "state", "since_unix_ms", "sequence", "gap", "number")
    JOINED_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    joined: JoinNode
    state: NodeState
    since_unix_ms: int
    sequence: int
    gap: bool
    number: int
    def __init__(self, joined: _Optional[_Union[JoinNode, _Mapping]] = ..., state: _Optional[_Union[NodeState, str]] = ..., since_unix_ms: _Optional[int] = ..., sequence: _Optional[int] = ..., gap: bool = ..., number: _Optional[int] = ...) -> None: ...

class NamespaceRecord(_message.Message):
    __slots__ = ("namespace", "since_unix_ms")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    since_unix_ms: int
    def __init__(self, namespace: _Optional[bytes] = ..., since_unix_ms: _Optional[int] = ...) -> None: ...

class ClaimsRecord(_message.Message):
    __slots__ = ("shard", "claims")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    shard: int
    claims: bytes
    def __init__(self, shard: _Optional[int] = ..., claims: _Optional[bytes] = ...) -> None: ...

class RequestsRecord(_message.Message):
    __slots__ = ("request_ids", "results")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    request_ids: bytes
    results: bytes
    def __init__(self, request_ids: _Optional[bytes] = ..., results: _Optional[bytes] = ...) -> None: ...

class SnapshotEnd(_message.Message):
    __slots__ = ("state_hash",)
    STATE_HASH_FIELD_NUMBER: _ClassVar[int]
    state_hash: bytes
    def __init__(self, state_hash: _Optional[bytes] = ...) -> None: ...
