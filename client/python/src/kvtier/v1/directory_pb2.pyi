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

class Withdrawal(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WITHDRAWAL_UNSPECIFIED: _ClassVar[Withdrawal]
    WITHDRAWAL_DRAINING: _ClassVar[Withdrawal]
    WITHDRAWAL_DRAINED: _ClassVar[Withdrawal]

class PlanKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLAN_KIND_UNSPECIFIED: _ClassVar[PlanKind]
    PLAN_KIND_DRAIN: _ClassVar[PlanKind]
    PLAN_KIND_REBALANCE: _ClassVar[PlanKind]

class PlanState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLAN_STATE_UNSPECIFIED: _ClassVar[PlanState]
    PLAN_STATE_RUNNING: _ClassVar[PlanState]
    PLAN_STATE_PAUSED: _ClassVar[PlanState]
    PLAN_STATE_DONE: _ClassVar[PlanState]
    PLAN_STATE_FAILED: _ClassVar[PlanState]
    PLAN_STATE_CANCELLED: _ClassVar[PlanState]

class StepKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_KIND_UNSPECIFIED: _ClassVar[StepKind]
    STEP_KIND_MOVE: _ClassVar[StepKind]
    STEP_KIND_COPY: _ClassVar[StepKind]
    STEP_KIND_DROP: _ClassVar[StepKind]

class StepState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_STATE_UNSPECIFIED: _ClassVar[StepState]
    STEP_STATE_PENDING: _ClassVar[StepState]
    STEP_STATE_RUNNING: _ClassVar[StepState]
    STEP_STATE_DONE: _ClassVar[StepState]
    STEP_STATE_FAILED: _ClassVar[StepState]
    STEP_STATE_SKIPPED: _ClassVar[StepState]

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
WITHDRAWAL_UNSPECIFIED: Withdrawal
WITHDRAWAL_DRAINING: Withdrawal
WITHDRAWAL_DRAINED: Withdrawal
PLAN_KIND_UNSPECIFIED: PlanKind
PLAN_KIND_DRAIN: PlanKind
PLAN_KIND_REBALANCE: PlanKind
PLAN_STATE_UNSPECIFIED: PlanState
PLAN_STATE_RUNNING: PlanState
PLAN_STATE_PAUSED: PlanState
PLAN_STATE_DONE: PlanState
PLAN_STATE_FAILED: PlanState
PLAN_STATE_CANCELLED: PlanState
STEP_KIND_UNSPECIFIED: StepKind
STEP_KIND_MOVE: StepKind
STEP_KIND_COPY: StepKind
STEP_KIND_DROP: StepKind
STEP_STATE_UNSPECIFIED: StepState
STEP_STATE_PENDING: StepState
STEP_STATE_RUNNING: StepState
STEP_STATE_DONE: StepState
STEP_STATE_FAILED: StepState
STEP_STATE_SKIPPED: StepState
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
    __slots__ = ("request_id", "now_unix_ms", "max_claims", "join_node", "set_node_state", "remove_node", "put_namespace", "remove_namespace", "claim_batch", "claim_repair", "drop_claims", "tick", "session", "expire_sessions", "start_plan", "step_plan", "round_plan", "turn_plan", "undrain_node", "append_audit")
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
    START_PLAN_FIELD_NUMBER: _ClassVar[int]
    STEP_PLAN_FIELD_NUMBER: _ClassVar[int]
    ROUND_PLAN_FIELD_NUMBER: _ClassVar[int]
    TURN_PLAN_FIELD_NUMBER: _ClassVar[int]
    UNDRAIN_NODE_FIELD_NUMBER: _ClassVar[int]
    APPEND_AUDIT_FIELD_NUMBER: _ClassVar[int]
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
    start_plan: StartPlan
    step_plan: StepPlan
    round_plan: RoundPlan
    turn_plan: TurnPlan
    undrain_node: UndrainNode
    append_audit: AppendAudit
    def __init__(self, request_id: _Optional[bytes] = ..., now_unix_ms: _Optional[int] = ..., max_claims: _Optional[int] = ..., join_node: _Optional[_Union[JoinNode, _Mapping]] = ..., set_node_state: _Optional[_Union[SetNodeState, _Mapping]] = ..., remove_node: _Optional[_Union[RemoveNode, _Mapping]] = ..., put_namespace: _Optional[_Union[PutNamespace, _Mapping]] = ..., remove_namespace: _Optional[_Union[RemoveNamespace, _Mapping]] = ..., claim_batch: _Optional[_Union[ClaimBatch, _Mapping]] = ..., claim_repair: _Optional[_Union[ClaimRepair, _Mapping]] = ..., drop_claims: _Optional[_Union[DropClaims, _Mapping]] = ..., tick: _Optional[_Union[Tick, _Mapping]] = ..., session: _Optional[_Union[SessionCommand, _Mapping]] = ..., expire_sessions: _Optional[_Union[ExpireSessions, _Mapping]] = ..., start_plan: _Optional[_Union[StartPlan, _Mapping]] = ..., step_plan: _Optional[_Union[StepPlan, _Mapping]] = ..., round_plan: _Optional[_Union[RoundPlan, _Mapping]] = ..., turn_plan: _Optional[_Union[TurnPlan, _Mapping]] = ..., undrain_node: _Optional[_Union[UndrainNode, _Mapping]] = ..., append_audit: _Optional[_Union[AppendAudit, _Mapping]] = ...) -> None: ...

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

class PlanOptions(_message.Message):
    __slots__ = ("node_bytes_per_second", "total_bytes_per_second", "deadline_ms", "drop_cold", "hot_within_ms")
    NODE_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    DROP_COLD_FIELD_NUMBER: _ClassVar[int]
    HOT_WITHIN_MS_FIELD_NUMBER: _ClassVar[int]
    node_bytes_per_second: int
    total_bytes_per_second: int
    deadline_ms: int
    drop_cold: bool
    hot_within_ms: int
    def __init__(self, node_bytes_per_second: _Optional[int] = ..., total_bytes_per_second: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., drop_cold: bool = ..., hot_within_ms: _Optional[int] = ...) -> None: ...

class PlanStep(_message.Message):
    __slots__ = ("kind", "session", "epoch", "to", "bytes", "hot", "why", "state", "reason", "done_bytes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FROM_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    HOT_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: StepKind
    session: str
    epoch: int
    to: bytes
    bytes: int
    hot: bool
    why: str
    state: StepState
    reason: str
    done_bytes: int
    def __init__(self, kind: _Optional[_Union[StepKind, str]] = ..., session: _Optional[str] = ..., epoch: _Optional[int] = ..., to: _Optional[bytes] = ..., bytes: _Optional[int] = ..., hot: bool = ..., why: _Optional[str] = ..., state: _Optional[_Union[StepState, str]] = ..., reason: _Optional[str] = ..., done_bytes: _Optional[int] = ..., **kwargs) -> None: ...

class PlanRecord(_message.Message):
    __slots__ = ("plan", "kind", "node", "options", "who", "steps", "state", "why", "round", "started_unix_ms", "ended_unix_ms", "moved_sessions", "copied_bytes", "left_bytes", "left_sessions")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STARTED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    ENDED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    MOVED_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    COPIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEFT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEFT_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    plan: bytes
    kind: PlanKind
    node: bytes
    options: PlanOptions
    who: str
    steps: _containers.RepeatedCompositeFieldContainer[PlanStep]
    state: PlanState
    why: str
    round: int
    started_unix_ms: int
    ended_unix_ms: int
    moved_sessions: int
    copied_bytes: int
    left_bytes: int
    left_sessions: int
    def __init__(self, plan: _Optional[bytes] = ..., kind: _Optional[_Union[PlanKind, str]] = ..., node: _Optional[bytes] = ..., options: _Optional[_Union[PlanOptions, _Mapping]] = ..., who: _Optional[str] = ..., steps: _Optional[_Iterable[_Union[PlanStep, _Mapping]]] = ..., state: _Optional[_Union[PlanState, str]] = ..., why: _Optional[str] = ..., round: _Optional[int] = ..., started_unix_ms: _Optional[int] = ..., ended_unix_ms: _Optional[int] = ..., moved_sessions: _Optional[int] = ..., copied_bytes: _Optional[int] = ..., left_bytes: _Optional[int] = ..., left_sessions: _Optional[int] = ...) -> None: ...

class StartPlan(_message.Message):
    __slots__ = ("plan",)
    PLAN_FIELD_NUMBER: _ClassVar[int]
    plan: PlanRecord
    def __init__(self, plan: _Optional[_Union[PlanRecord, _Mapping]] = ...) -> None: ...

class StepPlan(_message.Message):
    __slots__ = ("plan", "round", "results")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    plan: bytes
    round: int
    results: _containers.RepeatedCompositeFieldContainer[StepResult]
    def __init__(self, plan: _Optional[bytes] = ..., round: _Optional[int] = ..., results: _Optional[_Iterable[_Union[StepResult, _Mapping]]] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("step", "state", "reason", "done_bytes")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    step: int
    state: StepState
    reason: str
    done_bytes: int
    def __init__(self, step: _Optional[int] = ..., state: _Optional[_Union[StepState, str]] = ..., reason: _Optional[str] = ..., done_bytes: _Optional[int] = ...) -> None: ...

class RoundPlan(_message.Message):
    __slots__ = ("plan", "round", "steps")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    plan: bytes
    round: int
    steps: _containers.RepeatedCompositeFieldContainer[PlanStep]
    def __init__(self, plan: _Optional[bytes] = ..., round: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[PlanStep, _Mapping]]] = ...) -> None: ...

class TurnPlan(_message.Message):
    __slots__ = ("plan", "state", "why", "who", "left_bytes", "left_sessions")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    LEFT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEFT_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    plan: bytes
    state: PlanState
    why: str
    who: str
    left_bytes: int
    left_sessions: int
    def __init__(self, plan: _Optional[bytes] = ..., state: _Optional[_Union[PlanState, str]] = ..., why: _Optional[str] = ..., who: _Optional[str] = ..., left_bytes: _Optional[int] = ..., left_sessions: _Optional[int] = ...) -> None: ...

class UndrainNode(_message.Message):
    __slots__ = ("node", "who")
    NODE_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    node: bytes
    who: str
    def __init__(self, node: _Optional[bytes] = ..., who: _Optional[str] = ...) -> None: ...

class AppendAudit(_message.Message):
    __slots__ = ("who", "what", "subject", "outcome")
    WHO_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    who: str
    what: str
    subject: str
    outcome: str
    def __init__(self, who: _Optional[str] = ..., what: _Optional[str] = ..., subject: _Optional[str] = ..., outcome: _Optional[str] = ...) -> None: ...

class AuditRecord(_message.Message):
    __slots__ = ("number", "unix_ms", "who", "what", "subject", "outcome")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    number: int
    unix_ms: int
    who: str
    what: str
    subject: str
    outcome: str
    def __init__(self, number: _Optional[int] = ..., unix_ms: _Optional[int] = ..., who: _Optional[str] = ..., what: _Optional[str] = ..., subject: _Optional[str] = ..., outcome: _Optional[str] = ...) -> None: ...

class AuditRecords(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[AuditRecord]
    def __init__(self, records: _Optional[_Iterable[_Union[AuditRecord, _Mapping]]] = ...) -> None: ...

class DirectoryRecord(_message.Message):
    __slots__ = ("header", "node", "namespace", "claims", "requests", "end", "session", "plan", "audit")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    header: SnapshotHeader
    node: NodeRecord
    namespace: NamespaceRecord
    claims: ClaimsRecord
    requests: RequestsRecord
    end: SnapshotEnd
    session: SessionRecord
    plan: PlanRecord
    audit: AuditRecords
    def __init__(self, header: _Optional[_Union[SnapshotHeader, _Mapping]] = ..., node: _Optional[_Union[NodeRecord, _Mapping]] = ..., namespace: _Optional[_Union[NamespaceRecord, _Mapping]] = ..., claims: _Optional[_Union[ClaimsRecord, _Mapping]] = ..., requests: _Optional[_Union[RequestsRecord, _Mapping]] = ..., end: _Optional[_Union[SnapshotEnd, _Mapping]] = ..., session: _Optional[_Union[SessionRecord, _Mapping]] = ..., plan: _Optional[_Union[PlanRecord, _Mapping]] = ..., audit: _Optional[_Union[AuditRecords, _Mapping]] = ...) -> None: ...

class SnapshotHeader(_message.Message):
    __slots__ = ("version", "now_unix_ms", "applied", "log_index", "log_term", "max_claims", "closed_epoch")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NOW_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    LOG_INDEX_FIELD_NUMBER: _ClassVar[int]
    LOG_TERM_FIELD_NUMBER: _ClassVar[int]
    MAX_CLAIMS_FIELD_NUMBER: _ClassVar[int]
    CLOSED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    version: int
    now_unix_ms: int
    applied: int
    log_index: int
    log_term: int
    max_claims: int
    closed_epoch: int
    def __init__(self, version: _Optional[int] = ..., now_unix_ms: _Optional[int] = ..., applied: _Optional[int] = ..., log_index: _Optional[int] = ..., log_term: _Optional[int] = ..., max_claims: _Optional[int] = ..., closed_epoch: _Optional[int] = ...) -> None: ...

class NodeRecord(_message.Message):
    __slots__ = ("joined", "state", "since_unix_ms", "sequence", "gap", "number", "withdrawal")
    JOINED_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWAL_FIELD_NUMBER: _ClassVar[int]
    joined: JoinNode
    state: NodeState
    since_unix_ms: int
    sequence: int
    gap: bool
    number: int
    withdrawal: Withdrawal
    def __init__(self, joined: _Optional[_Union[JoinNode, _Mapping]] = ..., state: _Optional[_Union[NodeState, str]] = ..., since_unix_ms: _Optional[int] = ..., sequence: _Optional[int] = ..., gap: bool = ..., number: _Optional[int] = ..., withdrawal: _Optional[_Union[Withdrawal, str]] = ...) -> None: ...

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
