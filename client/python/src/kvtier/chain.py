"""Block names: hash chains over tokens, as the engines make them."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import blake3
import xxhash

from kvtier.errors import InvalidError

VLLM_SHA256 = "vllm/sha256_cbor"
VLLM_XXHASH = "vllm/xxhash_cbor"
SGLANG = "sglang/sha256"
VLLM_DEFAULT_SEED = "vllm-none-hash"

# One of the extra keys of a vLLM block: a LoRA name or salt, a multimodal item with the offset where it
# begins, or the digest of prompt embeddings.
ExtraKey: TypeAlias = "str | bytes | tuple[str, int]"


def block_name(engine_hash: bytes) -> bytes:
    """The name of a block: the engine's chain hash if it has 32 bytes, else BLAKE3(length, hash)."""
    if len(engine_hash) == 32:
        return bytes(engine_hash)
    if not 16 <= len(engine_hash) <= 64:
        raise InvalidError(f"engine hash of {len(engine_hash)} bytes, want 16 to 64")
    return blake3.blake3(struct.pack("<I", len(engine_hash)) + engine_hash).digest()


class VLLMChain:
    """vLLM's chain of block hashes, over the canonical CBOR of (parent, tokens, extra keys)."""

    def __init__(self, algorithm: str = VLLM_SHA256, seed: str = VLLM_DEFAULT_SEED) -> None:
        if algorithm not in (VLLM_SHA256, VLLM_XXHASH):
            raise InvalidError(f"hash algorithm {algorithm!r}, want {VLLM_SHA256} or {VLLM_XXHASH}")
        self._sha = algorithm == VLLM_SHA256
        self.digest = self._hash(_cbor(seed))  # of the last block; at first what stands for no block

    def next(self, tokens: Sequence[int], extra: Sequence[ExtraKey] = ()) -> bytes:
        """Adds a full block and returns its hash."""
        body = [b"\x83", _cbor(self.digest), _head(4, len(tokens)), *(_head(0, t) for t in tokens)]
        body.append(_cbor(list(extra)) if extra else b"\xf6")
        self.digest = self._hash(b"".join(body))
        return self.digest

    def _hash(self, data: bytes) -> bytes:
        return hashlib.sha256(data).digest() if self._sha else xxhash.xxh3_128_digest(data)


class SGLangChain:
    """SGLang's chain of page hashes: SHA-256 over the hash before and the tokens."""

    def __init__(self) -> None:
        self._parent = b""

    def next(self, tokens: Sequence[int]) -> bytes:
        """Adds a page and returns its hash."""
        self._parent = hashlib.sha256(self._parent + struct.pack(f"<{len(tokens)}I", *tokens)).digest()
        return self._parent


def names_of_tokens(tokens: Sequence[int], block_tokens: int, seed: str = VLLM_DEFAULT_SEED) -> list[bytes]:
    """The names of the full blocks of a prompt, by vLLM's sha256_cbor chain."""
    chain = VLLMChain(VLLM_SHA256, seed)
    return [chain.next(block) for block in full_blocks(tokens, block_tokens)]


def full_blocks(tokens: Sequence[int], block_tokens: int) -> Iterator[Sequence[int]]:
    """The full blocks of a prompt; a rest shorter than a block is left out."""
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        yield tokens[start : start + block_tokens]


def _head(major: int, n: int) -> bytes:
    """A CBOR major type and its number in the shortest form."""
    if n < 0:
        raise InvalidError(f"token {n} is negative")
    if n < 24:
        return bytes((major << 5 | n,))
    for code, fmt, limit in ((24, ">BB", 1 << 8), (25, ">BH", 1 << 16), (26, ">BI", 1 << 32), (27, ">BQ", 1 << 64)):
        if n < limit:
            return struct.pack(fmt, major << 5 | code, n)
    raise InvalidError(f"{n} does not fit 64 bits")


def _cbor(value: str | bytes | int | Sequence[object]) -> bytes:
    if isinstance(value, str):
        data = value.encode()
        return _head(3, len(data)) + data
    if isinstance(value, bytes):
        return _head(2, len(value)) + value
    if isinstance(value, int):
        return _head(0, value) if value >= 0 else _head(1, -1 - value)
    return _head(4, len(value)) + b"".join(_cbor(v) for v in value)  # type: ignore[arg-type]
