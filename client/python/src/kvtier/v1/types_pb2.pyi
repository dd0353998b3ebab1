import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_HBM: _ClassVar[Tier]
    TIER_RAM: _ClassVar[Tier]
    TIER_NVME: _ClassVar[Tier]
    TIER_REMOTE: _ClassVar[Tier]

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNSPECIFIED: _ClassVar[Reason]
    REASON_NOT_FOUND: _ClassVar[Reason]
    REASON_PART_MISSING: _ClassVar[Reason]
    REASON_NO_SPACE: _ClassVar[Reason]
    REASON_OVER_QUOTA: _ClassVar[Reason]
    REASON_TIMEOUT: _ClassVar[Reason]
    REASON_CORRUPT: _ClassVar[Reason]
    REASON_IDENTITY_MISMATCH: _ClassVar[Reason]
    REASON_IO_ERROR: _ClassVar[Reason]
    REASON_IN_FLIGHT: _ClassVar[Reason]
    REASON_STOPPING: _ClassVar[Reason]
    REASON_CANCELLED: _ClassVar[Reason]
    REASON_ATTACHMENT_ENDED: _ClassVar[Reason]
    REASON_UNREACHABLE: _ClassVar[Reason]

class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_CODE_UNSPECIFIED: _ClassVar[ErrorCode]
    ERROR_CODE_NOT_FOUND: _ClassVar[ErrorCode]
    ERROR_CODE_NO_SPACE: _ClassVar[ErrorCode]
    ERROR_CODE_OVER_QUOTA: _ClassVar[ErrorCode]
    ERROR_CODE_CORRUPT: _ClassVar[ErrorCode]
    ERROR_CODE_CLOSED: _ClassVar[ErrorCode]
    ERROR_CODE_EXPIRED: _ClassVar[ErrorCode]
    ERROR_CODE_UNKNOWN_NAMESPACE: _ClassVar[ErrorCode]
    ERROR_CODE_BAD_LAYOUT: _ClassVar[ErrorCode]
    ERROR_CODE_INVALID: _ClassVar[ErrorCode]
    ERROR_CODE_UNKNOWN_ATTACHMENT: _ClassVar[ErrorCode]
    ERROR_CODE_DENIED: _ClassVar[ErrorCode]
    ERROR_CODE_INCOMPATIBLE: _ClassVar[ErrorCode]
    ERROR_CODE_UNAVAILABLE: _ClassVar[ErrorCode]
    ERROR_CODE_LOST: _ClassVar[ErrorCode]
    ERROR_CODE_IDENTITY_MISMATCH: _ClassVar[ErrorCode]
    ERROR_CODE_IO: _ClassVar[ErrorCode]
    ERROR_CODE_FROZEN: _ClassVar[ErrorCode]
    ERROR_CODE_MOVED: _ClassVar[ErrorCode]
TIER_UNSPECIFIED: Tier
TIER_HBM: Tier
TIER_RAM: Tier
TIER_NVME: Tier
TIER_REMOTE: Tier
REASON_UNSPECIFIED: Reason
REASON_NOT_FOUND: Reason
REASON_PART_MISSING: Reason
REASON_NO_SPACE: Reason
REASON_OVER_QUOTA: Reason
REASON_TIMEOUT: Reason
REASON_CORRUPT: Reason
REASON_IDENTITY_MISMATCH: Reason
REASON_IO_ERROR: Reason
REASON_IN_FLIGHT: Reason
REASON_STOPPING: Reason
REASON_CANCELLED: Reason
REASON_ATTACHMENT_ENDED: Reason
REASON_UNREACHABLE: Reason
ERROR_CODE_UNSPECIFIED: ErrorCode
ERROR_CODE_NOT_FOUND: ErrorCode
ERROR_CODE_NO_SPACE: ErrorCode
ERROR_CODE_OVER_QUOTA: ErrorCode
ERROR_CODE_CORRUPT: ErrorCode
ERROR_CODE_CLOSED: ErrorCode
ERROR_CODE_EXPIRED: ErrorCode
ERROR_CODE_UNKNOWN_NAMESPACE: ErrorCode
ERROR_CODE_BAD_LAYOUT: ErrorCode
ERROR_CODE_INVALID: ErrorCode
ERROR_CODE_UNKNOWN_ATTACHMENT: ErrorCode
ERROR_CODE_DENIED: ErrorCode
ERROR_CODE_INCOMPATIBLE: ErrorCode
ERROR_CODE_UNAVAILABLE: ErrorCode
ERROR_CODE_LOST: ErrorCode
ERROR_CODE_IDENTITY_MISMATCH: ErrorCode
ERROR_CODE_IO: ErrorCode
ERROR_CODE_FROZEN: ErrorCode
ERROR_CODE_MOVED: ErrorCode

class ErrorDetail(_message.Message):
    __slots__ = ("code", "message", "retry_after")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_FIELD_NUMBER: _ClassVar[int]
    code: ErrorCode
    message: str
    retry_after: _duration_pb2.Duration
    def __init__(self, code: _Optional[_Union[ErrorCode, str]] = ..., message: _Optional[str] = ..., retry_after: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("model", "revision", "dtype", "kv_dtype", "attention", "layers", "kv_heads", "head_dim", "engine_layout", "engine_epoch", "tensor_parallel", "pipeline_parallel", "context_parallel", "isa", "hash_algorithm", "hash_seed", "block_tokens", "parts")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    ENGINE_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    ISA_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    HASH_SEED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    model: str
    revision: str
    dtype: str
    kv_dtype: str
    attention: str
    layers: int
    kv_heads: int
    head_dim: int
    engine_layout: str
    engine_epoch: int
    tensor_parallel: int
    pipeline_parallel: int
    context_parallel: int
    isa: str
    hash_algorithm: str
    hash_seed: str
    block_tokens: int
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    def __init__(self, model: _Optional[str] = ..., revision: _Optional[str] = ..., dtype: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., attention: _Optional[str] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., engine_layout: _Optional[str] = ..., engine_epoch: _Optional[int] = ..., tensor_parallel: _Optional[int] = ..., pipeline_parallel: _Optional[int] = ..., context_parallel: _Optional[int] = ..., isa: _Optional[str] = ..., hash_algorithm: _Optional[str] = ..., hash_seed: _Optional[str] = ..., block_tokens: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("name", "page_bytes", "blocks_per_page", "last_blocks", "ranks")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PER_PAGE_FIELD_NUMBER: _ClassVar[int]
    LAST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    name: str
    page_bytes: int
    blocks_per_page: int
    last_blocks: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., page_bytes: _Optional[int] = ..., blocks_per_page: _Optional[int] = ..., last_blocks: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...
