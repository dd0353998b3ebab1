package gpu

import (
	"math"
	"testing"
)

// Every 16-bit pattern survives a round trip, and every value half way between two neighbours goes to the even one.
func TestSixteenBitTypesRoundTrip(t *testing.T) {
	for _, typ := range []DType{BF16, FP16} {
		var b, c [2]byte
		for u := range 1 << 16 {
			b[0], b[1] = byte(u), byte(u>>8)
			v := typ.Load(b[:])
			typ.Store(c[:], v)
			if v != v {
				if got := typ.Load(c[:]); got == got {
					t.Fatalf("%s %#04x: NaN became %v", typ, u, got)
				}
				continue
			}
			if b != c {
				t.Fatalf("%s %#04x: %v stored as %#x", typ, u, v, c)
			}
			if u&0x7fff < topFinite(typ) {
				checkHalfWay(t, typ, uint16(u), v)
			}
		}
	}
}

// topFinite is the largest finite magnitude of a 16-bit type.
func topFinite(typ DType) int {
	if typ == BF16 {
		return 0x7f7f
	}
	return 0x7bff
}

func checkHalfWay(t *testing.T, typ DType, u uint16, v float32) {
	t.Helper()
	var b, c [2]byte
	b[0], b[1] = byte(u+1), byte((u+1)>>8)
	next := typ.Load(b[:])
	mid := float32((float64(v) + float64(next)) / 2)
	for _, x := range []struct {
		v    float32
		want uint16
	}{{mid, u + u&1}, {math.Nextafter32(mid, v), u}, {math.Nextafter32(mid, next), u + 1}} {
		typ.Store(c[:], x.v)
		if got := uint16(c[0]) | uint16(c[1])<<8; got != x.want {
			t.Fatalf("%s: %v stored as %#04x, want %#04x", typ, x.v, got, x.want)
		}
	}
}

func TestHalfOverflows(t *testing.T) {
	var b [2]byte
	for _, x := range []struct{ v, want float32 }{
		{65519, 65504}, {65520, float32(math.Inf(1))}, {-1e9, float32(math.Inf(-1))}, {1e-9, 0}, {1 << 15, 1 << 15},
	} {
		FP16.Store(b[:], x.v)
		if got := FP16.Load(b[:]); got != x.want {
			t.Errorf("fp16 of %v = %v, want %v", x.v, got, x.want)
		}
	}
	FP16.Store(b[:], float32(math.Copysign(0, -1)))
	if got := FP16.Load(b[:]); !math.Signbit(float64(got)) {
		t.Error("fp16 lost the sign of zero")
	}
}
