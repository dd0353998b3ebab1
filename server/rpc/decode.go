package rpc

import (
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"math"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

func invalid(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, paging.ErrInvalid)...)
}

// namespaceID decodes 32 bytes.
func namespaceID(b []byte) (paging.NamespaceID, error) {
	if len(b) != len(paging.NamespaceID{}) {
		return paging.NamespaceID{}, invalid("namespace_id has %d bytes, want 32", len(b))
	}
	return paging.NamespaceID(b), nil
}

// id decodes the 16 bytes of an attachment, attempt or adopt token.
func id(field string, b []byte) (ID, error) {
	if len(b) != kvstatus.AttachmentBytes {
		return ID{}, invalid("%s has %d bytes, want %d", field, len(b), kvstatus.AttachmentBytes)
	}
	return ID(b), nil
}

// optionalID is nil for no bytes.
func optionalID(field string, b []byte) (*ID, error) {
	if len(b) == 0 {
		return nil, nil
	}
	v, err := id(field, b)
	return &v, err
}

// appendNames appends the names packed in b to dst: at least one, at most
// paging.MaxCallBlocks.
func appendNames(dst []paging.BlockName, b []byte) ([]paging.BlockName, error) {
	const size = len(paging.BlockName{})
	n := len(b) / size
	switch {
	case len(b)%size != 0:
		return dst, invalid("block_names has %d bytes, which is no multiple of %d", len(b), size)
	case n == 0:
		return dst, invalid("block_names is empty: name at least one block")
	case n > paging.MaxCallBlocks:
		return dst, invalid("block_names has %d blocks, at most %d in a call", n, paging.MaxCallBlocks)
	}
	for ; len(b) > 0; b = b[size:] {
		dst = append(dst, paging.BlockName(b))
	}
	return dst, nil
}

// repeats finds the first name that stands twice, with memory that is kept
// between calls. The zero value is ready for use; not safe for concurrent use.
type repeats struct {
	table []int32 // index + 1 of a name, open addressing
}

// maxProbes is the average of probes per name beyond which names were chosen to
// collide, and are hashed with a seed.
const maxProbes = 8

// find returns the indexes of the first repetition, or ok false.
func (r *repeats) find(names []paging.BlockName) (first, second int, ok bool) {
	size := 4
	for size < 2*len(names) {
		size *= 2
	}
	if cap(r.table) < size {
		r.table = make([]int32, size)
	}
	// Names are hashes: their own bits spread them, unless somebody made them up.
	plain := func(name *paging.BlockName) uint64 { return binary.LittleEndian.Uint64(name[8:]) }
	first, second, ok, gaveUp := search(r.table[:size], names, plain, maxProbes*len(names))
	if gaveUp {
		seed := maphash.MakeSeed()
		seeded := func(name *paging.BlockName) uint64 { return maphash.Bytes(seed, name[:]) }
		first, second, ok, _ = search(r.table[:size], names, seeded, math.MaxInt)
	}
	return first, second, ok
}

// search fills table, whose length is a power of two, until a name stands twice or
// the probes are used up.
func search(table []int32, names []paging.BlockName, hash func(*paging.BlockName) uint64, probes int) (first, second int, ok, gaveUp bool) {
	clear(table)
	mask := uint64(len(table) - 1)
	for i := range names {
		for slot := hash(&names[i]) & mask; ; slot = (slot + 1) & mask {
			at := table[slot]
			if at == 0 {
				table[slot] = int32(i + 1)
				break
			}
			if names[at-1] == names[i] {
				return int(at - 1), i, true, false
			}
			if probes--; probes < 0 {
				return 0, 0, false, true
			}
		}
	}
	return 0, 0, false, false
}

// check is find as an error.
func (r *repeats) check(names []paging.BlockName) error {
	if first, second, ok := r.find(names); ok {
		return invalid("block_names: block %d repeats block %d (%s)", second, first, names[first].Short())
	}
	return nil
}

// duration decodes d: absent or 0 is def, negative is wrong, beyond most is wrong.
func duration(field string, d *durationpb.Duration, def, most time.Duration) (time.Duration, error) {
	if d == nil {
		return def, nil
	}
	v := d.AsDuration()
	switch {
	case d.CheckValid() != nil || v < 0:
		return 0, invalid("%s is not a valid duration", field)
	case v == 0:
		return def, nil
	case v > most:
		return 0, invalid("%s is %v, at most %v", field, v, most)
	}
	return v, nil
}

// rows decodes 32-bit little-endian row numbers.
func rows(b []byte) ([]uint32, error) {
	if len(b)%4 != 0 || len(b)/4 > paging.MaxCallBlocks {
		return nil, invalid("rows has %d bytes: want 4 a row, at most %d rows", len(b), paging.MaxCallBlocks)
	}
	out := make([]uint32, 0, len(b)/4)
	for ; len(b) > 0; b = b[4:] {
		out = append(out, binary.LittleEndian.Uint32(b))
	}
	return out, nil
}

func retention(r *kvtierv1.Retention) (*Retention, error) {
	if r == nil {
		return nil, nil
	}
	if r.GetPriority() > 100 {
		return nil, invalid("retention.priority is %d, at most 100", r.GetPriority())
	}
	ttl, err := duration("retention.ttl", r.GetTtl(), 0, math.MaxInt64)
	if err != nil {
		return nil, err
	}
	return &Retention{Priority: uint8(r.GetPriority()), TTL: ttl, RefreshOnHit: r.GetRefreshOnHit()}, nil
}

// layout copies the message; paging.Layout.Validate judges it.
func layout(l *kvtierv1.Layout) paging.Layout {
	out := paging.Layout{
		Model: l.GetModel(), Revision: l.GetRevision(), DType: l.GetDtype(), KVDType: l.GetKvDtype(),
		Attention: l.GetAttention(), Layers: l.GetLayers(), KVHeads: l.GetKvHeads(), HeadDim: l.GetHeadDim(),
		EngineLayout: l.GetEngineLayout(), EngineEpoch: l.GetEngineEpoch(),
		TP: l.GetTensorParallel(), PP: l.GetPipelineParallel(), CP: l.GetContextParallel(),
		ISA: l.GetIsa(), HashAlgorithm: l.GetHashAlgorithm(), HashSeed: l.GetHashSeed(),
		BlockTokens: l.GetBlockTokens(),
	}
	for _, p := range l.GetParts() {
		out.Parts = append(out.Parts, paging.Part{
			Name: p.GetName(), PageBytes: p.GetPageBytes(), BlocksPerPage: p.GetBlocksPerPage(),
			LastBlocks: p.GetLastBlocks(), Ranks: p.GetRanks(),
		})
	}
	return out
}

func hello(h *kvtierv1.Hello) (*Hello, error) {
	if h.GetProtocolVersion() < kvstatus.ProtocolVersion {
		return nil, fmt.Errorf("protocol version %d, this node speaks %d: update the client: %w",
			h.GetProtocolVersion(), kvstatus.ProtocolVersion, paging.ErrIncompatible)
	}
	for _, f := range [...]struct{ name, value string }{
		{"engine", h.GetEngine()}, {"engine_version", h.GetEngineVersion()}, {"group_id", h.GetGroupId()},
	} {
		if len(f.value) > kvstatus.MaxNameBytes {
			return nil, invalid("hello.%s has %d bytes, at most %d", f.name, len(f.value), kvstatus.MaxNameBytes)
		}
	}
	secret := len(h.GetGroupSecret())
	switch {
	case h.GetGroupId() == "" && secret > 0:
		return nil, invalid("hello.group_secret without group_id")
	case h.GetGroupId() != "" && (secret < kvstatus.MinSecretBytes || secret > kvstatus.MaxSecretBytes):
		return nil, invalid("hello.group_secret has %d bytes, want %d to %d", secret, kvstatus.MinSecretBytes, kvstatus.MaxSecretBytes)
	case len(h.GetRanks()) > paging.MaxCallBlocks:
		return nil, invalid("hello.ranks has %d ranks, at most %d", len(h.GetRanks()), paging.MaxCallBlocks)
	}
	previous, err := optionalID("hello.previous_attachment", h.GetPreviousAttachment())
	if err != nil {
		return nil, err
	}
	return &Hello{
		Engine: h.GetEngine(), EngineVersion: h.GetEngineVersion(), Group: h.GetGroupId(),
		GroupSecret: h.GetGroupSecret(), StagingBytes: h.GetStagingBytes(), Previous: previous, Ranks: h.GetRanks(), DevicePool: h.GetDevicePool(), WorkingBytes: h.GetWorkingBytes(),
	}, nil
}

// scratch is the memory that decoding a call needs, kept between the calls of
// one goroutine.
type scratch struct {
	names   []paging.BlockName
	repeats repeats
	tokens  []ID
}

// packed decodes and checks block names into the scratch.
func (s *scratch) packed(b []byte) ([]paging.BlockName, error) {
	names, err := appendNames(s.names[:0], b)
	if err != nil {
		return nil, err
	}
	s.names = names
	return names, s.repeats.check(names)
}

// maxLeaseTTL bounds the time to live of a lease: a longer one says nothing
// that Renew does not say better.
const maxLeaseTTL = 24 * time.Hour

// maxFetchTime bounds the time that a fetch may wait.
const maxFetchTime = 10 * time.Minute

// fetch decodes m into r; r.Names lies in the scratch.
func (s *scratch) fetch(m *kvtierv1.FetchRequest, r *FetchRequest) (err error) {
	*r = FetchRequest{
		First: int(m.GetFirstBlock()), PrefixLease: m.GetPrefixLease(), Parts: paging.PartSet(m.GetParts()),
		Wanted: uint8(m.GetWantedTier()), ForGroup: m.GetForGroup(),
	}
	if r.Namespace, err = namespaceID(m.GetNamespaceId()); err != nil {
		return err
	}
	if r.Set, err = setMode(m.GetMode()); err != nil {
		return err
	}
	if r.Timeout, err = duration("timeout", m.GetTimeout(), 0, maxFetchTime); err != nil {
		return err
	}
	if r.TTL, err = duration("lease_ttl", m.GetLeaseTtl(), 0, maxLeaseTTL); err != nil {
		return err
	}
	switch m.GetWantedTier() {
	case kvtierv1.Tier_TIER_UNSPECIFIED, kvtierv1.Tier_TIER_RAM, kvtierv1.Tier_TIER_HBM:
	default:
		return invalid("wanted_tier is %v: nodes hand out slots of TIER_RAM and TIER_HBM", m.GetWantedTier())
	}
	r.Names, err = s.packed(m.GetBlockNames())
	return err
}

func setMode(m kvtierv1.FetchMode) (bool, error) {
	switch m {
	case kvtierv1.FetchMode_FETCH_MODE_UNSPECIFIED, kvtierv1.FetchMode_FETCH_MODE_PREFIX:
		return false, nil
	case kvtierv1.FetchMode_FETCH_MODE_SET:
		return true, nil
	}
	return false, invalid("mode is %v", m)
}

// released decodes the tokens of a release into the scratch.
func (s *scratch) released(m *kvtierv1.ReleaseRequest) ([]ID, error) {
	if n := len(m.GetLeaseIds()) + len(m.GetAdoptTokens()); n > kvstatus.MaxReleases {
		return nil, invalid("release of %d leases, at most %d in a call", n, kvstatus.MaxReleases)
	}
	s.tokens = s.tokens[:0]
	for _, b := range m.GetAdoptTokens() {
		token, err := id("adopt_tokens", b)
		if err != nil {
			return nil, err
		}
		s.tokens = append(s.tokens, token)
	}
	return s.tokens, nil
}
