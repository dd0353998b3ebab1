package paging

import (
	"encoding/binary"
	"fmt"
	"unicode/utf8"

	"github.com/zeebo/blake3"
)

// Bounds of a layout and a namespace.
const (
	MaxNameBytes     = 1024  // each string of a layout
	MaxTenantBytes   = 256   // tenant name
	MaxSaltBytes     = 1024  // cache salt
	MaxRanks         = 65536 // tensor × pipeline × context parallel
	MaxBlocksPerPage = 65536 // least common multiple over the parts of a layout
)

// namespaceVersion is the version of the canonical encoding. It is hashed: a
// new version gives new ids.
const namespaceVersion = 1

// Domains keep ids of different kinds apart: sixteen bytes before what is hashed.
const (
	namespaceDomain = "kvtier namespace"
	keyDomain       = "kvtier page key."
)

// attentions are the kinds of attention that a layout may name.
var attentions = [...]string{"mha", "gqa", "mqa", "mla", "window", "ssm", "hybrid"}

// Validate checks the bounds given in proto/kvtier/v1/types.proto and in the
// constants of this package. The error is ErrBadLayout and names the field.
func (l *Layout) Validate() error {
	if err := l.validateStrings(); err != nil {
		return err
	}
	for _, f := range []struct {
		name  string
		value uint32
	}{
		{"layers", l.Layers}, {"tensor_parallel", l.TP}, {"pipeline_parallel", l.PP},
		{"context_parallel", l.CP}, {"block_tokens", l.BlockTokens},
	} {
		if f.value == 0 {
			return badLayout("%s is 0, want at least 1", f.name)
		}
	}
	if ranks := l.ranks(); ranks > MaxRanks {
		return badLayout("tensor_parallel × pipeline_parallel × context_parallel is more than %d", MaxRanks)
	}
	if len(l.Parts) == 0 || len(l.Parts) > MaxParts {
		return badLayout("%d parts, want 1 to %d", len(l.Parts), MaxParts)
	}
	names := make(map[string]int, len(l.Parts))
	for i := range l.Parts {
		if err := l.validatePart(i); err != nil {
			return err
		}
		if j, dup := names[l.Parts[i].Name]; dup {
			return badLayout("parts[%d].name %q is also the name of parts[%d]", i, l.Parts[i].Name, j)
		}
		names[l.Parts[i].Name] = i
	}
	if step := l.step(l.AllParts()); step > MaxBlocksPerPage {
		return badLayout("blocks_per_page: the pages of all parts end together only every %d blocks or more, want at most %d", step, MaxBlocksPerPage)
	}
	return nil
}

func badLayout(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrBadLayout, fmt.Sprintf(format, args...))
}

// ranks is the number of ranks, MaxRanks+1 if there are more than that.
func (l *Layout) ranks() uint64 {
	n := uint64(1)
	for _, f := range [...]uint32{l.TP, l.PP, l.CP} {
		if n *= uint64(f); n > MaxRanks {
			return MaxRanks + 1
		}
	}
	return n
}

func (l *Layout) validateStrings() error {
	for _, f := range []struct {
		name, value string
		optional    bool
	}{
		{name: "model", value: l.Model},
		{name: "revision", value: l.Revision, optional: true},
		{name: "dtype", value: l.DType, optional: true},
		{name: "kv_dtype", value: l.KVDType},
		{name: "attention", value: l.Attention},
		{name: "engine_layout", value: l.EngineLayout},
		{name: "isa", value: l.ISA, optional: true},
		{name: "hash_algorithm", value: l.HashAlgorithm},
		{name: "hash_seed", value: l.HashSeed, optional: true},
	} {
		if err := validateString(f.name, f.value, f.optional); err != nil {
			return err
		}
	}
	for _, a := range attentions {
		if l.Attention == a {
			return nil
		}
	}
	return badLayout("attention is %q, want one of %q", l.Attention, attentions)
}

func validateString(name, value string, optional bool) error {
	switch {
	case value == "" && !optional:
		return badLayout("%s is empty", name)
	case len(value) > MaxNameBytes:
		return badLayout("%s has %d bytes, want at most %d", name, len(value), MaxNameBytes)
	case !utf8.ValidString(value):
		return badLayout("%s is not UTF-8", name)
	}
	return nil
}

func (l *Layout) validatePart(i int) error {
	p := &l.Parts[i]
	if err := validateString(fmt.Sprintf("parts[%d].name", i), p.Name, false); err != nil {
		return err
	}
	if p.PageBytes < MinPageBytes || p.PageBytes > MaxPageBytes {
		return badLayout("parts[%d].page_bytes is %d, want %d to %d", i, p.PageBytes, MinPageBytes, MaxPageBytes)
	}
	if p.BlocksPerPage == 0 {
		return badLayout("parts[%d].blocks_per_page is 0, want at least 1", i)
	}
	for j, r := range p.Ranks {
		if uint64(r) >= l.ranks() {
			return badLayout("parts[%d].ranks names rank %d of %d", i, r, l.ranks())
		}
		if j > 0 && r <= p.Ranks[j-1] {
			return badLayout("parts[%d].ranks is not rising at %d", i, r)
		}
	}
	return nil
}

// Validate checks the layout, and the bounds of tenant and salt. The error is
// ErrBadLayout for the layout, else ErrInvalid.
func (n *Namespace) Validate() error {
	if err := n.Layout.Validate(); err != nil {
		return err
	}
	switch {
	case n.Tenant == "":
		return fmt.Errorf("%w: tenant is empty", ErrInvalid)
	case len(n.Tenant) > MaxTenantBytes:
		return fmt.Errorf("%w: tenant has %d bytes, want at most %d", ErrInvalid, len(n.Tenant), MaxTenantBytes)
	case !utf8.ValidString(n.Tenant):
		return fmt.Errorf("%w: tenant is not UTF-8", ErrInvalid)
	case len(n.Salt) > MaxSaltBytes:
		return fmt.Errorf("%w: salt has %d bytes, want at most %d", ErrInvalid, len(n.Salt), MaxSaltBytes)
	}
	return nil
}

// EncodeNamespace returns the canonical encoding of n: version, then every
// field in order, numbers little-endian, strings and lists after their 32-bit
// length (docs/formats.md). Equal namespaces and only they have equal encodings;
// nil and empty lists are equal.
func EncodeNamespace(n *Namespace) []byte {
	e := encoder{b: make([]byte, 0, 512)}
	version := uint32(namespaceVersion)
	e.u32("version", &version)
	n.walk(&e)
	return e.b
}

// DecodeNamespace is the inverse of EncodeNamespace. ErrIncompatible if b has
// another version, ErrCorrupt if it is no canonical encoding. Bounds are not
// checked: see Validate.
func DecodeNamespace(b []byte) (*Namespace, error) {
	d := decoder{b: b}
	var version uint32
	if d.u32("version", &version); d.err == nil && version != namespaceVersion {
		return nil, fmt.Errorf("%w: encoded namespace has version %d, want %d", ErrIncompatible, version, namespaceVersion)
	}
	n := new(Namespace)
	n.walk(&d)
	if d.err == nil && len(d.b) > 0 {
		d.err = fmt.Errorf("%w: %d bytes after an encoded namespace", ErrCorrupt, len(d.b))
	}
	if d.err != nil {
		return nil, d.err
	}
	return n, nil
}

// ID is the BLAKE3-256 of a domain and the canonical encoding.
func (n *Namespace) ID() NamespaceID {
	return blake3.Sum256(append([]byte(namespaceDomain), EncodeNamespace(n)...))
}

// DiffLayouts names the first field in which a and b differ, with both values,
// for people. Empty if they are equal.
func DiffLayouts(a, b *Layout) string {
	var la, lb lister
	a.walk(&la)
	b.walk(&lb)
	for i := range la.names {
		if la.values[i] != lb.values[i] {
			return fmt.Sprintf("%s: %s and %s", la.names[i], la.values[i], lb.values[i])
		}
	}
	return ""
}

// StorageKey is the BLAKE3-256 of a domain, the namespace, the block name and
// the part number (32 bits, little-endian).
func StorageKey(ns NamespaceID, name BlockName, part int) Key {
	var b [len(keyDomain) + 32 + 32 + 4]byte
	n := copy(b[:], keyDomain)
	n += copy(b[n:], ns[:])
	n += copy(b[n:], name[:])
	binary.LittleEndian.PutUint32(b[n:], uint32(part))
	return blake3.Sum256(b[:])
}

// NameFromEngineHash makes a block name of an engine's chain hash: 32 bytes are
// taken as they are, other lengths from 16 to 64 are hashed as
// BLAKE3(length as 32 bits little-endian ‖ hash). ErrInvalid otherwise.
func NameFromEngineHash(h []byte) (BlockName, error) {
	switch n := len(h); {
	case n == 32:
		return BlockName(h), nil
	case n < 16 || n > 64:
		return BlockName{}, fmt.Errorf("%w: engine hash of %d bytes, want 16 to 64", ErrInvalid, n)
	}
	var b [4 + 64]byte
	binary.LittleEndian.PutUint32(b[:], uint32(len(h)))
	n := 4 + copy(b[4:], h)
	return blake3.Sum256(b[:n]), nil
}
