package paging

import (
	"encoding/binary"
	"fmt"
	"strconv"
)

// A walker visits the fields of a layout or a namespace in their canonical
// order. Only a decoder changes what it visits. Encoding, decoding, comparing and printing are walkers, so a field that
// is added to a walk is added to all of them.
type walker interface {
	u32(name string, p *uint32)
	u64(name string, p *uint64)
	str(name string, p *string)
	bin(name string, p *[]byte)
	// list visits the length of a list whose elements are encoded in least bytes
	// or more, and returns the length to go on with.
	list(name string, n, least int) int
}

func (l *Layout) walk(w walker) {
	w.str("model", &l.Model)
	w.str("revision", &l.Revision)
	w.str("dtype", &l.DType)
	w.str("kv_dtype", &l.KVDType)
	w.str("attention", &l.Attention)
	w.u32("layers", &l.Layers)
	w.u32("kv_heads", &l.KVHeads)
	w.u32("head_dim", &l.HeadDim)
	w.str("engine_layout", &l.EngineLayout)
	w.u32("engine_epoch", &l.EngineEpoch)
	w.u32("tensor_parallel", &l.TP)
	w.u32("pipeline_parallel", &l.PP)
	w.u32("context_parallel", &l.CP)
	w.str("isa", &l.ISA)
	w.str("hash_algorithm", &l.HashAlgorithm)
	w.str("hash_seed", &l.HashSeed)
	w.u32("block_tokens", &l.BlockTokens)
	if n := w.list("parts", len(l.Parts), 24); n != len(l.Parts) {
		l.Parts = make([]Part, n) // only a decoder comes here
	}
	for i := range l.Parts {
		l.Parts[i].walk(w, "parts["+strconv.Itoa(i)+"].")
	}
}

func (p *Part) walk(w walker, prefix string) {
	w.str(prefix+"name", &p.Name)
	w.u64(prefix+"page_bytes", &p.PageBytes)
	w.u32(prefix+"blocks_per_page", &p.BlocksPerPage)
	w.u32(prefix+"last_blocks", &p.LastBlocks)
	if n := w.list(prefix+"ranks", len(p.Ranks), 4); n != len(p.Ranks) {
		p.Ranks = make([]uint32, n)
	}
	for i := range p.Ranks {
		w.u32(prefix+"ranks", &p.Ranks[i])
	}
}

func (n *Namespace) walk(w walker) {
	n.Layout.walk(w)
	w.str("tenant", &n.Tenant)
	w.bin("salt", &n.Salt)
}

// encoder appends little-endian numbers and length-prefixed strings and lists.
type encoder struct{ b []byte }

func (e *encoder) u32(_ string, p *uint32) { e.b = binary.LittleEndian.AppendUint32(e.b, *p) }
func (e *encoder) u64(_ string, p *uint64) { e.b = binary.LittleEndian.AppendUint64(e.b, *p) }

func (e *encoder) str(_ string, p *string) {
	e.list("", len(*p), 1)
	e.b = append(e.b, *p...)
}

func (e *encoder) bin(_ string, p *[]byte) {
	e.list("", len(*p), 1)
	e.b = append(e.b, *p...)
}

func (e *encoder) list(_ string, n, _ int) int {
	e.b = binary.LittleEndian.AppendUint32(e.b, uint32(n))
	return n
}

// decoder is the inverse of encoder. After the first fault it reads zeros and
// empty lists.
type decoder struct {
	b   []byte
	err error
}

func (d *decoder) take(name string, n uint64) []byte {
	if d.err == nil && n > uint64(len(d.b)) {
		d.err = fmt.Errorf("%w: encoded namespace ends inside %s", ErrCorrupt, name)
	}
	if d.err != nil {
		return nil
	}
	b := d.b[:n]
	d.b = d.b[n:]
	return b
}

func (d *decoder) u32(name string, p *uint32) {
	*p = 0
	if b := d.take(name, 4); b != nil {
		*p = binary.LittleEndian.Uint32(b)
	}
}

func (d *decoder) u64(name string, p *uint64) {
	*p = 0
	if b := d.take(name, 8); b != nil {
		*p = binary.LittleEndian.Uint64(b)
	}
}

func (d *decoder) str(name string, p *string) {
	var n uint32
	d.u32(name, &n)
	*p = string(d.take(name, uint64(n)))
}

func (d *decoder) bin(name string, p *[]byte) {
	var n uint32
	d.u32(name, &n)
	*p = append([]byte(nil), d.take(name, uint64(n))...)
}

// list refuses a length that the bytes left cannot hold.
func (d *decoder) list(name string, _, least int) int {
	var n uint32
	d.u32(name, &n)
	if d.err == nil && uint64(n)*uint64(least) > uint64(len(d.b)) {
		d.err = fmt.Errorf("%w: encoded namespace says %d %s", ErrCorrupt, n, name)
	}
	if d.err != nil {
		return 0
	}
	return int(n)
}

// lister collects the fields as text, for people.
type lister struct {
	names  []string
	values []string
}

func (l *lister) add(name, value string) {
	l.names = append(l.names, name)
	l.values = append(l.values, value)
}

func (l *lister) u32(name string, p *uint32) { l.add(name, strconv.FormatUint(uint64(*p), 10)) }
func (l *lister) u64(name string, p *uint64) { l.add(name, strconv.FormatUint(*p, 10)) }
func (l *lister) str(name string, p *string) { l.add(name, strconv.Quote(*p)) }
func (l *lister) bin(name string, p *[]byte) { l.add(name, fmt.Sprintf("%x", *p)) }

func (l *lister) list(name string, n, _ int) int {
	l.add("number of "+name, strconv.Itoa(n))
	return n
}
