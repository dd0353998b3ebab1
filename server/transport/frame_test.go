package transport

import (
	"bytes"
	"errors"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
)

func TestHeader(t *testing.T) {
	h := header{kind: framePage, flags: 3, length: 1 << 20, request: 1<<63 + 7, index: 4095, offset: 127 << 20, value: 1<<64 - 1}
	var b [headerBytes]byte
	h.put(b[:])
	if got, err := parseHeader(b[:]); err != nil || got != h {
		t.Errorf("%+v, %v, want %+v", got, err, h)
	}
	for bit := range headerBytes * 8 {
		b[bit/8] ^= 1 << (bit % 8)
		if _, err := parseHeader(b[:]); !errors.Is(err, paging.ErrCorrupt) {
			t.Errorf("bit %d flipped: %v, want %v", bit, err, paging.ErrCorrupt)
		}
		b[bit/8] ^= 1 << (bit % 8)
	}
}

// TestFrameBounds offers every kind of frame to every end of a connection.
func TestFrameBounds(t *testing.T) {
	takes := map[role][]frameKind{
		bulkSource:    {frameRequest, frameCancel},
		bulkTarget:    {framePage, frameMissing, frameEnd, frameBeat},
		controlSource: {frameHave, frameCall, framePing, frameDoubt},
		controlTarget: {frameHeld, frameReply, framePong},
	}
	var scratch [headerBytes]byte
	for as, kinds := range takes {
		for kind := range frameKind(64) {
			most, ok := as.most(kind)
			if ok != slices.Contains(kinds, kind) {
				t.Errorf("role %d takes frames of kind %d: %v", as, kind, ok)
			}
			if !ok {
				continue
			}
			h := header{kind: kind, length: most}
			if _, err := readHeader(bytes.NewReader(put(h)), as, scratch[:]); err != nil {
				t.Errorf("role %d, kind %d, %d bytes: %v", as, kind, most, err)
			}
			h.length++
			if _, err := readHeader(bytes.NewReader(put(h)), as, scratch[:]); !errors.Is(err, paging.ErrInvalid) {
				t.Errorf("role %d, kind %d, %d bytes: %v, want %v", as, kind, h.length, err, paging.ErrInvalid)
			}
		}
	}
}

func put(h header) []byte {
	b := make([]byte, headerBytes)
	h.put(b)
	return b
}

func TestPayloadIsChecked(t *testing.T) {
	b := appendFrame(nil, header{kind: frameCall}, []byte("argument"))
	h, err := parseHeader(b)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := readPayload(bytes.NewReader(b[headerBytes:]), &h, nil); err != nil || string(got) != "argument" {
		t.Errorf("%q, %v", got, err)
	}
	b[headerBytes+3] ^= 8
	if _, err := readPayload(bytes.NewReader(b[headerBytes:]), &h, nil); !errors.Is(err, paging.ErrCorrupt) {
		t.Errorf("flipped: %v, want %v", err, paging.ErrCorrupt)
	}
}

// requestOf builds a request of pages given as (block, part, bytes).
func requestOf(pages ...[3]int) *PageRequest {
	r := &PageRequest{Namespace: ns}
	for _, p := range pages {
		if !r.fits(nameOf(p[0]), p[1], uint32(p[2]), maxLotBytes) {
			return nil
		}
		r.add(nameOf(p[0]), p[1], uint32(p[2]))
	}
	return r
}

func TestRequest(t *testing.T) {
	r := requestOf([3]int{0, 0, 4096}, [3]int{0, 5, 77}, [3]int{0, 63, 1 << 20}, [3]int{1, 5, 77}, [3]int{0, 0, 4096})
	got, err := decodeRequest(r.encode(1500 * time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	if got.Namespace != r.Namespace || !slices.Equal(got.Blocks, r.Blocks) || !slices.Equal(got.rows, r.rows) ||
		!slices.Equal(got.parts, r.parts) || got.lengths != r.lengths || got.bytes != r.bytes || got.timeout != 1500*time.Millisecond {
		t.Errorf("got %+v, want %+v", got, r)
	}
	if block, part, length := got.At(3); block != 1 || part != 5 || length != 77 || got.Len() != 5 || got.Bytes() != 2*(4096+77)+1<<20 || got.PartBytes(63) != 1<<20 {
		t.Errorf("page 3 is block %d part %d with %d bytes of %d pages, %d bytes", block, part, length, got.Len(), got.Bytes())
	}
}

func TestRequestFits(t *testing.T) {
	one := requestOf([3]int{0, 3, 4096})
	for _, c := range []struct {
		what              string
		block, part, size int
		fits              bool
	}{
		{"the next part", 0, 4, 9, true},
		{"the next block", 1, 3, 4096, true},
		{"a part before", 0, 2, 9, false},
		{"the same page", 0, 3, 4096, false},
		{"another length of the part", 1, 3, 4097, false},
		{"more than a lot", 1, 4, maxLotBytes, false},
	} {
		if got := one.fits(nameOf(c.block), c.part, uint32(c.size), maxLotBytes); got != c.fits {
			t.Errorf("%s fits: %v, want %v", c.what, got, c.fits)
		}
	}
	if big := requestOf([3]int{0, 0, paging.MaxPageBytes}); big == nil {
		t.Error("one page longer than a lot does not fit into a request of its own")
	} else if _, err := decodeRequest(big.encode(time.Second)); err != nil {
		t.Errorf("one page longer than a lot: %v", err)
	}
	full := &PageRequest{}
	for i := range maxRequestBlocks {
		full.add(nameOf(i), 0, 1)
	}
	if full.fits(nameOf(maxRequestBlocks), 0, 1, maxLotBytes) || !full.fits(nameOf(maxRequestBlocks-1), 1, 1, maxLotBytes) {
		t.Error("a request is full after another number of blocks")
	}
	if n := len(full.encode(time.Second)); n > maxRequestBytes {
		t.Errorf("a full request has %d bytes, more than %d", n, maxRequestBytes)
	}
}

// TestRequestRefused breaks an encoded request in every way that its decoder
// guards against.
func TestRequestRefused(t *testing.T) {
	good := func() []byte {
		return requestOf([3]int{0, 1, 4096}, [3]int{0, 2, 77}, [3]int{1, 1, 4096}).encode(time.Second)
	}
	const parts, blocks = requestFixedBytes, requestFixedBytes + 2*requestPartBytes
	for what, change := range map[string]func(b []byte) []byte{
		"short":               func(b []byte) []byte { return b[:requestFixedBytes-1] },
		"a byte less":         func(b []byte) []byte { return b[:len(b)-1] },
		"a byte more":         func(b []byte) []byte { return append(b, 0) },
		"no parts":            func(b []byte) []byte { b[36] = 0; return b },
		"65 parts":            func(b []byte) []byte { b[36] = 65; return b },
		"no blocks":           func(b []byte) []byte { b[38] = 0; return b },
		"part 64":             func(b []byte) []byte { b[parts+requestPartBytes] = 64; return b },
		"parts not rising":    func(b []byte) []byte { b[parts+requestPartBytes] = 1; return b },
		"zeros that are not":  func(b []byte) []byte { b[parts+1] = 1; return b },
		"no length":           func(b []byte) []byte { clear(b[parts+4 : parts+8]); return b },
		"too long":            func(b []byte) []byte { b[parts+7] = 0x80; return b },
		"a lot too large":     func(b []byte) []byte { b[parts+6] = 0x70; return b },
		"a block of nothing":  func(b []byte) []byte { clear(b[blocks+32 : blocks+40]); return b },
		"a part not declared": func(b []byte) []byte { b[blocks+32] |= 8; return b },
		"a part not asked":    func(b []byte) []byte { b[blocks+32] &^= 4; return b },
	} {
		if _, err := decodeRequest(change(good())); !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("%s: %v, want %v", what, err, paging.ErrInvalid)
		}
	}
	if _, err := decodeRequest(good()); err != nil {
		t.Errorf("unchanged: %v", err)
	}
}

func TestVersionsMeet(t *testing.T) {
	for _, c := range []struct {
		a, b versions
		want uint16 // 0: they do not meet
	}{
		{versions{1, 1}, versions{1, 1}, 1},
		{versions{1, 2}, versions{2, 3}, 2},
		{versions{1, 2}, versions{1, 2}, 2},
		{versions{1, 2}, versions{3, 4}, 0},
		{versions{4, 5}, versions{1, 9}, 5},
		{versions{0, 0}, versions{0, 1}, 0},
		{versions{2, 1}, versions{1, 2}, 0},
	} {
		for _, pair := range [][2]versions{{c.a, c.b}, {c.b, c.a}} {
			got, ok := pair[0].meet(pair[1])
			if ok != (c.want > 0) || ok && got != c.want {
				t.Errorf("%v and %v: %d, %v, want %d", pair[0], pair[1], got, ok, c.want)
			}
		}
	}
}

func TestReasonsAreSentinels(t *testing.T) {
	for _, c := range []struct {
		reason Reason
		want   error
	}{
		{NotFound, paging.ErrNotFound}, {NoSpace, paging.ErrNoSpace}, {OverQuota, paging.ErrOverQuota}, {Timeout, paging.ErrExpired},
		{Corrupt, paging.ErrCorrupt}, {Identity, paging.ErrIdentity}, {Identity, paging.ErrCorrupt}, {IOError, paging.ErrIO},
		{Stopping, paging.ErrClosed}, {Unreachable, paging.ErrUnavailable}, {InFlight, paging.ErrUnavailable}, {Denied, paging.ErrDenied},
		{Mismatch, paging.ErrUnknownNamespace}, {Reason(200), paging.ErrUnavailable},
	} {
		err := error(&PageError{Reason: c.reason})
		if !errors.Is(err, c.want) {
			t.Errorf("%v is not %v", err, c.want)
		}
		if got := reasonOf(err); got != c.reason {
			t.Errorf("reason of %v is %v", err, got)
		}
	}
	if errors.Is(&PageError{Reason: Corrupt}, paging.ErrIdentity) {
		t.Error("every corruption is an identity mismatch")
	}
	if got := reasonOf(paging.ErrIdentity); got != Identity {
		t.Errorf("reason of %v is %v", paging.ErrIdentity, got)
	}
}

func seeds(f *testing.F) {
	f.Add([]byte{})
	f.Add(requestOf([3]int{0, 1, 4096}, [3]int{0, 2, 77}, [3]int{1, 1, 4096}).encode(time.Second))
	f.Add((&HaveRequest{Namespace: ns, Names: []paging.BlockName{nameOf(1), nameOf(2)}, Parts: 5}).encode())
	f.Add((&hello{kind: Bulk, speaks: versions{1, 1}, from: placement.NodeID{1}, to: placement.NodeID{2}, cluster: "c"}).encode())
	f.Add((&welcome{version: 1, node: placement.NodeID{2}}).encode())
	f.Add(encodeDoubt(&paging.PageID{BlockID: paging.BlockID{Namespace: ns, Name: nameOf(1)}, Part: 63}))
	f.Add(appendMissing(appendMissing(nil, missingPage{0, NotFound}), missingPage{4095, IOError}))
	f.Add(encodeHeld([]Held{{5, 2}, {0, 0}}))
	f.Add(appendFrame(nil, header{kind: frameCancel, request: 1}, nil))
	f.Add(appendFrame(appendFrame(nil, header{kind: frameRequest}, requestOf([3]int{0, 0, 64}).encode(time.Second)), header{kind: frameCancel}, nil))
	f.Add(append(put(header{kind: framePage, length: 64, value: paging.Checksum(make([]byte, 64))}), make([]byte, 64)...))
	f.Add(append(put(header{kind: frameBeat}), put(header{kind: frameEnd, flags: 9})...))
}

// FuzzDecoders: what is decoded encodes to the same bytes, and nothing panics.
func FuzzDecoders(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, err := decodeRequest(b); err == nil {
			if n := r.timeout.Milliseconds(); n >= 1 && n <= 1<<31 && !bytes.Equal(r.encode(r.timeout), b) {
				t.Errorf("request of %x encodes to %x", b, r.encode(r.timeout))
			}
		}
		if q, err := decodeHave(b); err == nil && !bytes.Equal(q.encode(), b) {
			t.Errorf("question %x encodes to %x", b, q.encode())
		}
		if p, err := decodeDoubt(b); err == nil && !bytes.Equal(encodeDoubt(&p), b) {
			t.Errorf("doubt %x encodes to %x", b, encodeDoubt(&p))
		}
		if held, err := decodeHeld(nil, b, len(b)/9); err == nil && !bytes.Equal(encodeHeld(held), b) {
			t.Errorf("answer %x encodes to %x", b, encodeHeld(held))
		}
		var again []byte
		if eachMissing(b, func(m missingPage) error { again = appendMissing(again, m); return nil }) == nil && len(again) != len(b) {
			t.Errorf("list %x encodes to %x", b, again)
		}
		if h, err := readHello(bytes.NewReader(b)); err == nil && !bytes.HasPrefix(b, h.encode()[:4]) {
			t.Errorf("hello %x encodes to %x", b, h.encode())
		}
		_, _ = readWelcome(bytes.NewReader(b))
		if len(b) >= headerBytes {
			if h, err := parseHeader(b); err == nil && !bytes.Equal(put(h), b[:headerBytes]) {
				t.Errorf("header %x encodes to %x", b[:headerBytes], put(h))
			}
		}
	})
}

// feed is a connection that has received some bytes and takes everything.
type feed struct {
	net.Conn
	in *bytes.Reader
}

func (f *feed) Read(b []byte) (int, error)       { return f.in.Read(b) }
func (f *feed) Write(b []byte) (int, error)      { return len(b), nil }
func (f *feed) Close() error                     { return nil }
func (f *feed) SetReadDeadline(time.Time) error  { return nil }
func (f *feed) SetWriteDeadline(time.Time) error { return nil }

func feedLink(b []byte) *link {
	c := &feed{in: bytes.NewReader(b)}
	return &link{Conn: c, raw: c, peer: placement.NodeID{9}, version: Version}
}

// seal makes frames of bytes, one after another, with the checksums that they
// ought to have, so that a fuzzer reaches what lies behind them.
func seal(b []byte) []byte {
	b = bytes.Clone(b)
	for at := 0; at+headerBytes <= len(b); {
		h, _ := parseHeader(b[at:])
		rest := b[at+headerBytes:]
		h.length = min(h.length&0xffff, uint32(len(rest)))
		if h.kind != framePage && h.length > 0 {
			h.value = paging.Checksum(rest[:h.length])
		}
		h.put(b[at:])
		at += headerBytes + int(h.length)
	}
	return b
}

// FuzzStreams gives bytes to the readers of all connections: they end, nothing
// stays pinned, and no page is called good that was not sent whole.
func FuzzStreams(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b)%2 == 1 {
			b = seal(b)
		}
		c := newCluster(t, newMemory())
		n := c.add(1, nil)
		n.src.put(nameOf(0), 0, 64, false)
		n.src.put(nameOf(1), 1, 4096, true)
		n.serveBulk(feedLink(b))
		n.serveControl(feedLink(b))

		p := newPeer(n.Transport, placement.NodeID{9})
		d := newDownload(p, feedLink(b))
		tr := newTray(t, want(0, 0, 64), want(1, 0, 64))
		call := newCall(t.Context(), n.Transport, tr.req)
		l := &lot{call: call, req: requestOf([3]int{0, 0, 64}, [3]int{1, 0, 64}), d: d}
		for i := range tr.req.Pages {
			call.mu.pages[i].leads = n.flights.lead(call.flight(i), call, i)
			slot, _ := tr.Slot(i)
			l.pages = append(l.pages, lotPage{index: i, slot: slot})
		}
		l.charged = 128
		_ = p.inflight.acquire(t.Context(), 128)
		_ = n.inflight.acquire(t.Context(), 128)
		_ = d.lots.acquire(t.Context(), 1)
		d.ask(l, time.Second)
		d.run()
		<-call.done
		call.workers.Wait()
		for i := range tr.req.Pages {
			if r := tr.result(i); r.Err == nil && paging.Checksum(tr.slots[i]) != r.Sum {
				t.Errorf("page %d was called good", i)
			}
		}
		if in := n.inflight.inUse(); in != 0 {
			t.Errorf("%d bytes are in flight for ever", in)
		}
		ctl := newControl(p, feedLink(b))
		ctl.run()
	})
}
