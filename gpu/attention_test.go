package gpu

import (
	"errors"
	"math"
	"testing"
)

func small() *Attention {
	return &Attention{Layout: NHD(FP32, 16, 2, 64), QHeads: 6, QType: FP32, Q: 1 << 20, Out: 2 << 20, Pool: 4 << 20, Pages: 3,
		MaxPages: 2, Table: []int32{2, 0, 1, 99}, SeqLens: []int32{20, 16}}
}

func TestAttentionRefusesOneWrongField(t *testing.T) {
	if err := small().Validate(); err != nil { // the 99 is behind the last page of its sequence
		t.Fatal(err)
	}
	nan := float32(math.NaN())
	for name, c := range map[string]struct {
		spoil func(a *Attention)
		want  error
	}{
		"7 heads over 2":   {func(a *Attention) { a.QHeads = 7 }, ErrShape},
		"no query heads":   {func(a *Attention) { a.QHeads = 0 }, ErrShape},
		"no query type":    {func(a *Attention) { a.QType = 0 }, ErrShape},
		"negative window":  {func(a *Attention) { a.Window = -1 }, ErrShape},
		"negative cap":     {func(a *Attention) { a.SoftCap = -1 }, ErrShape},
		"NaN cap":          {func(a *Attention) { a.SoftCap = nan }, ErrShape},
		"NaN scale":        {func(a *Attention) { a.Scale = nan }, ErrShape},
		"splits":           {func(a *Attention) { a.Splits = 257 }, ErrShape},
		"pool at 8":        {func(a *Attention) { a.Pool += 8 }, ErrAlign},
		"Q at 4":           {func(a *Attention) { a.Q += 4 }, ErrAlign},
		"out at 4":         {func(a *Attention) { a.Out += 4 }, ErrAlign},
		"table cut":        {func(a *Attention) { a.Table = a.Table[:3] }, ErrShape},
		"negative columns": {func(a *Attention) { a.MaxPages = -1 }, ErrShape},
		"page 3 of 3":      {func(a *Attention) { a.Table[1] = 3 }, ErrTable},
		"page -1":          {func(a *Attention) { a.Table[0] = -1 }, ErrTable},
		"now in use":       {func(a *Attention) { a.SeqLens[1] = 17 }, ErrTable},
		"length -1":        {func(a *Attention) { a.SeqLens[0] = -1 }, ErrSeqLen},
		"length 33":        {func(a *Attention) { a.SeqLens[0] = 33 }, ErrSeqLen},
		"layout":           {func(a *Attention) { a.HeadStride = 16 }, ErrStride},
	} {
		a := small()
		c.spoil(a)
		err := a.Validate()
		if !errors.Is(err, c.want) || !errors.Is(err, ErrArgument) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
		var arg *ArgError
		if !errors.As(err, &arg) || arg.Arg == "" {
			t.Errorf("%s: %v names no argument", name, err)
		}
	}
	a := small()
	a.Table[0], a.Window = 99, 4 // the first page lies before the window: not read, so not judged
	if err := a.Validate(); err != nil {
		t.Errorf("table entry before the window: %v", err)
	}
}

// Two tokens with scores 0 and ln 3 weigh 1/4 and 3/4.
func TestReferenceByHand(t *testing.T) {
	l := NHD(FP32, 16, 1, 64)
	a := &Attention{Layout: l, QHeads: 1, Scale: 1, QType: FP32, Pages: 1, MaxPages: 1, Table: []int32{0}, SeqLens: []int32{2}}
	q, pool := make([]byte, a.QBytes()), make([]byte, l.PoolBytes(1))
	FP32.Store(q, 1)
	for i := range pool[:l.VOffset] {
		pool[i] = 0
	}
	k1, v1 := l.Row(0, 1, 0)
	_, v0 := l.Row(0, 0, 0)
	FP32.Store(pool[k1:], float32(math.Log(3)))
	FP32.Store(pool[v0:], 8)
	FP32.Store(pool[v1:], 16)
	near := func(name string, want float64) {
		t.Helper()
		if got := a.Reference(q, pool)[0]; math.Abs(got-want) > 1e-6 {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
	near("two tokens", 0.25*8+0.75*16)
	a.Window = 1
	near("window of one", 16)
	a.Window, a.SoftCap = 0, 1
	w := math.Exp(math.Tanh(math.Log(3)))
	near("soft cap", (8+16*w)/(1+w))
	a.SeqLens[0] = 0
	near("empty", 0)
	if got := a.KVBytes(); got != 0 {
		t.Errorf("KV bytes of an empty sequence: %d", got)
	}
}

func TestSpansCoverEveryRow(t *testing.T) {
	a := small()
	var spans []Span
	for s := range a.Spans {
		spans = append(spans, s)
	}
	covered := func(at Addr, n int64) bool {
		for _, s := range spans {
			if at >= s.Addr && at+Addr(n) <= s.Addr+Addr(s.Bytes) {
				return true
			}
		}
		return false
	}
	for b, n := range a.SeqLens {
		for i := range int(n) {
			for h := range a.KVHeads {
				k, v := a.Row(a.Table[b*a.MaxPages+i/a.Tokens], i%a.Tokens, h)
				if !covered(a.Pool+Addr(k), 256) || !covered(a.Pool+Addr(v), 256) {
					t.Fatalf("row of sequence %d token %d head %d not in a span", b, i, h)
				}
			}
		}
	}
	if !covered(a.Q, a.QBytes()) || !covered(a.Out, a.OutBytes()) {
		t.Error("Q or Out not in a span")
	}
}

func TestPageSumRefusesOneWrongField(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(p *PageSum)
		want  error
	}{
		"no bytes":  {func(p *PageSum) { p.Bytes = 0 }, ErrShape},
		"20 bytes":  {func(p *PageSum) { p.Bytes = 20 }, ErrShape},
		"2 GiB":     {func(p *PageSum) { p.Bytes = 2 << 30 }, ErrShape},
		"page at 8": {func(p *PageSum) { p.Pages[1] += 8 }, ErrAlign},
		"out at 4":  {func(p *PageSum) { p.Out += 4 }, ErrAlign},
		"too many":  {func(p *PageSum) { p.Pages = make([]Addr, MaxBatch+1) }, ErrShape},
	} {
		p := &PageSum{Pages: []Addr{4096, 8192}, Bytes: 4096, Out: 64}
		if err := p.Validate(); err != nil {
			t.Fatal(err)
		}
		c.spoil(p)
		if err := p.Validate(); !errors.Is(err, c.want) || !errors.Is(err, ErrArgument) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}
