"""What needs no daemon: names, checksums, frames, errors of the wire, the breaker's decision."""

from __future__ import annotations

import itertools
import json
import struct

import numpy as np
import pytest
from conftest import LAYOUT, ROOT
from hypothesis import given
from hypothesis import strategies as st

import kvtier
from kvtier import _handoff, _stream, chain, checksum, errors, words
from kvtier._memory import SLOT
from kvtier._mux import RELEASE, REVOKED, Mux
from kvtier._stall import STALL_TICKS, Stall, Verdict
from kvtier.v1 import pages_pb2 as pb
from kvtier.v1 import types_pb2

VECTORS = ROOT / "paging" / "testdata"


HASHES = json.loads((VECTORS / "hash_vectors.json").read_text())["vectors"]


def vectors(function: str) -> list[dict]:
    found = [v for v in HASHES if v["function"] == function]
    assert found, "the file of vectors changed its form"
    return found


def extra_keys(keys: list | None) -> list[chain.ExtraKey]:
    """JSON has no tuples."""
    return [(key[0], key[1]) if isinstance(key, list) else key for key in keys or ()]


@pytest.mark.parametrize("v", vectors("vllm_block_chain"), ids=lambda v: v["name"])
def test_vllm_chain_agrees_with_the_vectors(v: dict) -> None:
    made = chain.VLLMChain("vllm/" + v["algo"], v["seed"])
    keys = v["extra_keys_per_block"] or []
    got = []
    for i, block in enumerate(chain.full_blocks(v["tokens"], v["block_size"])):
        got.append(made.next(block, extra_keys(keys[i] if i < len(keys) else None)).hex())
    assert got == v["expected_hex"]


@pytest.mark.parametrize("v", vectors("vllm_none_hash"), ids=lambda v: v["name"])
def test_vllm_none_hash_agrees_with_the_vectors(v: dict) -> None:
    assert [chain.VLLMChain("vllm/" + v["algo"], v["seed"]).digest.hex()] == v["expected_hex"]


@pytest.mark.parametrize("v", vectors("sglang_page_chain"), ids=lambda v: v["name"])
def test_sglang_chain_agrees_with_the_vectors(v: dict) -> None:
    made, size, tokens = chain.SGLangChain(), v["page_size"], v["tokens"]
    assert [made.next(tokens[at : at + size]).hex() for at in range(0, len(tokens), size)] == v["expected_hex"]


def test_checksum_vectors_agree_with_the_go_package() -> None:
    vectors = json.loads((VECTORS / "checksum_vectors.json").read_text())["vectors"]
    assert len(vectors) > 5
    for v in vectors:
        index = np.arange(v["bytes"], dtype=np.uint64)
        page = ((index * np.uint64(2654435761)) >> np.uint64(13)).astype(np.uint8)
        assert f"{checksum.page_checksum(page):016x}" == v["sum"], v["bytes"]


@given(st.integers(0, 200_000), st.integers(1, 255))
def test_checksum_sees_every_byte(size: int, flip: int) -> None:
    page = np.arange(size, dtype=np.uint8)
    before = checksum.page_checksum(page)
    if size:
        page[size // 2] ^= flip
        assert checksum.page_checksum(page) != before


@given(st.binary(min_size=0, max_size=80))
def test_block_names(engine_hash: bytes) -> None:
    if not 16 <= len(engine_hash) <= 64:
        with pytest.raises(kvtier.InvalidError):
            chain.block_name(engine_hash)
        return
    name = chain.block_name(engine_hash)
    assert len(name) == 32
    assert (name == engine_hash) == (len(engine_hash) == 32)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=70), st.integers(1, 9))
def test_names_are_a_chain_of_full_blocks(tokens: list[int], block: int) -> None:
    names = chain.names_of_tokens(tokens, block)
    assert len(names) == len(tokens) // block
    assert chain.names_of_tokens(tokens[: len(names) * block], block) == names
    if names:
        other = [tokens[0] ^ 1, *tokens[1:]]
        assert not set(chain.names_of_tokens(other, block)) & set(names), "a block's name covers all before it"
        assert chain.names_of_tokens(tokens, block, "another seed")[0] != names[0]


@given(st.lists(st.binary(min_size=31, max_size=33), max_size=5))
def test_pack(names: list[bytes]) -> None:
    if names and all(len(n) == 32 for n in names):
        assert words.pack(names) == b"".join(names)
    else:
        with pytest.raises(kvtier.InvalidError):
            words.pack(names)


@given(st.binary(max_size=120))
def test_random_packets_are_no_frames(packet: bytes) -> None:
    try:
        _, entries = _handoff.decode_extents(packet)
    except (kvtier.InvalidError, kvtier.IncompatibleError):
        return
    assert entries


@given(
    st.lists(
        st.tuples(st.integers(1, 1 << 31), st.sampled_from([1, 2]), st.integers(1, 1 << 20)), min_size=1, max_size=64
    )
)
def test_extents_frame(entries: list[tuple[int, int, int]]) -> None:
    entries = [(i, kind, units * 4096) for i, kind, units in entries]
    payload = struct.pack("<II", 9, len(entries)) + b"".join(struct.pack("<IIQ", *e) for e in entries)
    assert _handoff.decode_extents(_handoff.frame(2, payload)) == (9, entries)
    with pytest.raises(kvtier.KvtierError):
        _handoff.decode_extents(_handoff.frame(2, payload[:-1]))


@given(st.binary(max_size=200))
def test_random_status_details(status: bytes) -> None:
    detail = errors.status_detail(status)
    assert detail is None or isinstance(detail, types_pb2.ErrorDetail)


def test_every_code_of_the_wire_has_an_error() -> None:
    seen = set()
    for name, code in types_pb2.ErrorCode.items():
        if code == types_pb2.ERROR_CODE_UNSPECIFIED:
            continue
        error = errors.from_detail(types_pb2.ErrorDetail(code=code, message="fetch block 7"), "fetch")
        assert type(error) is not kvtier.KvtierError, name
        assert "fetch block 7" in str(error)
        seen.add(type(error))
    assert len(seen) == len(types_pb2.ErrorCode.items()) - 1
    assert isinstance(errors.from_detail(types_pb2.ErrorDetail(code=999)), kvtier.IncompatibleError)


def status_with(detail: types_pb2.ErrorDetail) -> bytes:
    """A google.rpc.Status by hand: code, message, one detail."""
    url, packed = b"type.googleapis.com/kvtier.v1.ErrorDetail", detail.SerializeToString()
    any_ = b"\x0a" + bytes([len(url)]) + url + b"\x12" + bytes([len(packed)]) + packed
    return b"\x08\x05" + b"\x12\x01x" + b"\x1a" + bytes([len(any_)]) + any_


def test_status_detail_round_trip() -> None:
    detail = types_pb2.ErrorDetail(code=types_pb2.ERROR_CODE_NO_SPACE, message="full")
    detail.retry_after.FromMilliseconds(250)
    got = errors.status_detail(status_with(detail))
    assert got == detail
    error = errors.from_detail(detail)
    assert isinstance(error, kvtier.NoSpaceError)
    assert error.retry_after == 0.25
    assert "--ram" in str(error), "an error says what to do"


@given(st.lists(st.tuples(st.floats(0.001, 0.1), st.booleans(), st.booleans()), max_size=60))
def test_breaker_opens_only_after_punctual_silence(ticks: list[tuple[float, bool, bool]]) -> None:
    stall, now, heard, silent = Stall(0.008), 0.0, 0, 0.0
    for gap, busy, speaks in ticks:
        now += gap
        heard += speaks
        was_open = stall.open
        verdict = stall.tick(now, int(busy), heard)
        silent = 0.0 if speaks else silent + gap
        if verdict is Verdict.TRIP:
            assert not was_open
            assert silent >= (STALL_TICKS - 1) * 0.006
        if verdict is Verdict.MEND:
            assert was_open
            assert speaks or heard
        assert stall.open == ((was_open or verdict is Verdict.TRIP) and verdict is not Verdict.MEND)


def test_breaker_trips_pings_and_mends() -> None:
    stall = Stall(0.008)
    verdicts = [stall.tick(i * 0.008, 1, 7) for i in range(8)]
    assert verdicts.index(Verdict.PING) < verdicts.index(Verdict.TRIP)
    assert stall.open
    assert stall.tick(1.0, 0, 8) is Verdict.MEND
    late = Stall(0.008)
    assert {late.tick(i * 0.05, 1, 7) for i in range(50)} == {Verdict.CALM}, "late ticks prove nothing"


@given(st.lists(st.sampled_from([(RELEASE, 1), (RELEASE, 2), (REVOKED, 3), None]), max_size=40))
def test_mux_sends_notes_in_batches_and_in_full(items: list[tuple[str, int] | None]) -> None:
    mux = Mux(lambda message: None)
    for item in items:
        if item is None:
            mux.send(pb.AttachRequest(renew=pb.RenewRequest()), answered=True)
        else:
            mux.post(item)
    mux.fail_all(kvtier.ClosedError("closed"), closing=True)
    sent = list(mux.requests())
    assert sum(r.HasField("renew") for r in sent) == items.count(None)
    for kind, ids in (
        (RELEASE, [i for r in sent for i in r.release.lease_ids]),
        (REVOKED, [i for r in sent for i in r.revoked.lease_ids]),
    ):
        assert ids == [item[1] for item in items if item is not None and item[0] == kind]
    with pytest.raises(kvtier.ClosedError):
        mux.ask(pb.AttachRequest(), 1)


@given(st.integers(0, 1000), st.lists(st.integers(1, 400), max_size=10))
def test_budget_never_exceeds_its_bound(most: int, sizes: list[int]) -> None:
    budget = _stream.Budget(most)
    count, taken = budget.take(sizes)
    assert taken == sum(sizes[:count]) <= most
    assert count == len(sizes) or taken + sizes[count] > most
    budget.give(taken)
    assert budget.used == 0


@given(st.integers(0, 40), st.integers(1, 4))
def test_pages_at(position: int, per: int) -> None:
    parts = (*LAYOUT.parts, kvtier.Part("wide", 4096, blocks_per_page=per))
    layout = words.Layout(**{**LAYOUT.__dict__, "parts": parts})
    assert layout.pages_at(position, 0b111) == 0b11 | (0b100 if (position + 1) % per == 0 else 0)


def test_wire_layout_has_every_field() -> None:
    layout = words.Layout(
        model="m",
        revision="r",
        dtype="d",
        kv_dtype="k",
        attention="gqa",
        layers=1,
        kv_heads=2,
        head_dim=3,
        engine_layout="e",
        engine_epoch=4,
        tensor_parallel=5,
        pipeline_parallel=6,
        context_parallel=7,
        isa="i",
        hash_algorithm="h",
        hash_seed="s",
        block_tokens=8,
        parts=(kvtier.Part("p", 9, 10, 11, (0, 1)),),
    )
    wire = layout.to_wire()
    assert {f.name for f, _ in wire.ListFields()} == {f.name for f in types_pb2.Layout.DESCRIPTOR.fields}
    assert {f.name for f, _ in wire.parts[0].ListFields()} == {f.name for f in types_pb2.Part.DESCRIPTOR.fields}


def test_slot_reference_has_the_documented_form() -> None:
    slot = np.frombuffer(struct.pack("<IIQQQ", 3, 4096, 8192, 5, 6), SLOT)[0]
    assert slot.item() == (3, 4096, 8192, 5, 6)
    assert SLOT.itemsize == 32


def incoming(blocks: int) -> _stream._Incoming:
    """A streamed fetch of blocks that the node said it has."""
    made = _stream._Incoming(LAYOUT, 0, blocks, 0b11, words.Mode.PREFIX)
    header = pb.ReadPagesHeader(usable_blocks=blocks, tiers=bytes([2] * blocks), parts=0b11)
    made.take(pb.ReadPagesResponse(header=header))
    return made


def pieces(block: int, part: int, cut: int, damage: bool = False) -> list[pb.ReadPagesResponse]:
    page = np.full(LAYOUT.parts[part].page_bytes, block + 1, np.uint8)
    total = checksum.page_checksum(page)
    if damage:
        page[7] ^= 1
    cuts = [0, cut, page.size]
    return [
        pb.ReadPagesResponse(
            chunk=pb.PageChunk(
                block=block, part=part, offset=a, data=page[a:b].tobytes(), page_bytes=page.size, checksum=total
            )
        )
        for a, b in itertools.pairwise(cuts)
    ]


@given(st.integers(1, 5), st.integers(1, 4095), st.none() | st.tuples(st.integers(0, 4), st.integers(0, 1)))
def test_a_streamed_page_with_a_wrong_checksum_ends_the_prefix(
    blocks: int, cut: int, damaged: tuple[int, int] | None
) -> None:
    made = incoming(blocks)
    for block in range(blocks):
        for part in range(2):
            for piece in pieces(block, part, cut, damaged == (block, part)):
                made.take(piece)
    made.end()
    lease = made.lease(_stream._Private(_stream.Budget(0), 0))
    hit = damaged is not None and damaged[0] < blocks
    assert lease.usable_blocks == (damaged[0] if hit else blocks)
    assert [(s.block, s.reason) for s in lease.shortfalls] == ([(damaged[0], words.Reason.CORRUPT)] if hit else [])
    for row in range(lease.rows):
        assert (lease.page(row) == row + 1).all()
        assert (lease.page(row, 1) == row + 1).all()


@given(st.lists(st.integers(0, 7), max_size=10))
def test_pieces_out_of_order_are_refused(order: list[int]) -> None:
    made = incoming(2)
    right = [piece for block in range(2) for part in range(2) for piece in pieces(block, part, 1000)]
    whole: set[int] = set()
    last = -1
    for at in order:
        begins, page = at % 2 == 0, at // 2
        if page in whole or (not begins and last != at - 1):
            with pytest.raises(kvtier.InvalidError):
                made.take(right[at])
            return
        made.take(right[at])
        last = at
        if not begins:
            whole.add(page)


@given(st.binary(max_size=64))
def test_random_pages_are_refused(data: bytes) -> None:
    with pytest.raises(kvtier.InvalidError):
        incoming(1).take(pb.ReadPagesResponse(chunk=pb.PageChunk(part=0, data=data, page_bytes=len(data))))
