package gpu

import (
	"errors"
	"testing"
)

func TestLayoutsOfEnginesAreValid(t *testing.T) {
	for _, typ := range []DType{BF16, FP16, FP32} {
		for _, tokens := range []int{16, 48, 64, 256} {
			for _, dim := range []int{64, 96, 128, 256} {
				for _, heads := range []int{1, 2, 8} {
					for name, l := range map[string]Layout{
						"NHD": NHD(typ, tokens, heads, dim), "HND": HND(typ, tokens, heads, dim), "packed": Packed(typ, tokens, heads, dim),
					} {
						checkRows(t, name, l)
					}
				}
			}
			checkRows(t, "latent", Latent(typ, tokens, 512, 64))
		}
	}
}

// checkRows marks every byte of every row of two pages: no byte twice, none outside PoolBytes.
func checkRows(t *testing.T, name string, l Layout) {
	t.Helper()
	if err := l.Validate(); err != nil {
		t.Fatalf("%s %+v: %v", name, l, err)
	}
	seen := make([]bool, l.PoolBytes(2))
	mark := func(at int64, dim int) {
		for i := at; i < at+int64(dim*l.Type.Size()); i++ {
			if seen[i] {
				t.Fatalf("%s %+v: byte %d belongs to two rows", name, l, i)
			}
			seen[i] = true
		}
	}
	for page := range int32(2) {
		for token := range l.Tokens {
			for head := range l.KVHeads {
				k, v := l.Row(page, token, head)
				mark(k, l.HeadDim)
				if !l.latent() {
					mark(v, l.ValueDim)
				}
			}
		}
	}
	for i, s := range seen {
		if !s {
			t.Fatalf("%s %+v: byte %d belongs to no row of a dense layout", name, l, i)
		}
	}
}

// A pool with all K pages in front, as vLLM's [2, pages, ...] tensors have it.
func TestSeparatePlanes(t *testing.T) {
	l := NHD(BF16, 16, 2, 64)
	plane := l.VOffset
	l.PageStride, l.VOffset = plane, 2*plane
	checkRows(t, "planes", l)
}

func TestLayoutRefusesOneWrongField(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(l *Layout)
		want  error
	}{
		"no type":              {func(l *Layout) { l.Type = 0 }, ErrShape},
		"tokens 8":             {func(l *Layout) { l.Tokens = 8 }, ErrShape},
		"tokens 20":            {func(l *Layout) { l.Tokens = 20 }, ErrShape},
		"tokens 512":           {func(l *Layout) { l.Tokens = 512 }, ErrShape},
		"no heads":             {func(l *Layout) { l.KVHeads = 0 }, ErrShape},
		"no stride":            {func(l *Layout) { l.PageBytes, l.PageStride = l.PageStride, 0 }, ErrStride},
		"short page":           {func(l *Layout) { l.PageBytes, l.PageStride = 256, 4096 }, ErrStride},
		"negative page":        {func(l *Layout) { l.PageBytes = -16 }, ErrStride},
		"head dim 80":          {func(l *Layout) { l.HeadDim, l.ValueDim = 80, 80 }, ErrShape},
		"value dim":            {func(l *Layout) { l.ValueDim = 64 }, ErrShape},
		"negative":             {func(l *Layout) { l.KOffset = -16 }, ErrStride},
		"huge":                 {func(l *Layout) { l.PageStride = 1 << 50 }, ErrStride},
		"row at 8":             {func(l *Layout) { l.VOffset += 8 }, ErrAlign},
		"head stride short":    {func(l *Layout) { l.HeadStride -= 16 }, ErrStride},
		"token stride short":   {func(l *Layout) { l.TokenStride -= 16 }, ErrStride},
		"heads on one another": {func(l *Layout) { l.HeadStride = 0 }, ErrStride},
		"page stride short":    {func(l *Layout) { l.PageStride = l.VOffset - 16 }, ErrStride},
		"V inside K":           {func(l *Layout) { l.VOffset = l.KOffset + 16 }, ErrStride},
		"K and V the same":     {func(l *Layout) { l.VOffset = l.KOffset }, ErrStride},
	} {
		l := NHD(BF16, 64, 8, 128)
		c.spoil(&l)
		if err := l.Validate(); !errors.Is(err, c.want) || !errors.Is(err, ErrArgument) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	l := HND(BF16, 64, 8, 128)
	l.TokenStride -= 16
	if err := l.Validate(); !errors.Is(err, ErrStride) {
		t.Errorf("HND with a short token stride: %v", err)
	}
	l = Latent(BF16, 64, 512, 64)
	l.VOffset = 16
	if err := l.Validate(); !errors.Is(err, ErrShape) {
		t.Errorf("latent with its value elsewhere: %v", err)
	}
}
