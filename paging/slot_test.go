package paging

import (
	"errors"
	"fmt"
	"math"
	"testing"
)

func TestSlotEncoding(t *testing.T) {
	for _, want := range []Slot{
		{},
		{Extent: 1, Bytes: 65536, Offset: 2 << 20, Generation: 9, Sum: 0x0102030405060708},
		{Extent: math.MaxUint32, Bytes: MaxPageBytes, Offset: math.MaxUint64, Generation: math.MaxUint64, Sum: math.MaxUint64},
	} {
		b := AppendSlot([]byte{7}, want)
		if len(b) != 1+SlotBytes {
			t.Fatalf("%d bytes", len(b))
		}
		if got, err := DecodeSlot(append(b[1:], 0xff)); err != nil || got != want {
			t.Errorf("got %+v, %v; want %+v", got, err, want)
		}
		if _, err := DecodeSlot(b[1:SlotBytes]); !errors.Is(err, ErrInvalid) {
			t.Errorf("a cut slot: %v", err)
		}
	}
	const golden = "0100000000000100000020000000000009000000000000000807060504030201"
	b := AppendSlot(nil, Slot{Extent: 1, Bytes: 65536, Offset: 2 << 20, Generation: 9, Sum: 0x0102030405060708})
	if got := fmt.Sprintf("%x", b); got != golden {
		t.Errorf("encoded as %s, want %s", got, golden)
	}
}

func TestIdentityMismatchIsCorruption(t *testing.T) {
	err := fmt.Errorf("load page: %w", ErrIdentity)
	if !errors.Is(err, ErrIdentity) || !errors.Is(err, ErrCorrupt) || errors.Is(ErrCorrupt, ErrIdentity) {
		t.Error("every identity mismatch is a corruption, and not the other way round")
	}
}

func TestPartSet(t *testing.T) {
	s := PartSet(0).With(0).With(63).With(5).Without(5)
	if !s.Has(0) || !s.Has(63) || s.Has(5) || s.Len() != 2 || !s.Contains(PartSet(1)) || s.Contains(PartSet(2)) || !s.Contains(0) {
		t.Errorf("%b", s)
	}
}
