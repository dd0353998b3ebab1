package paging

import (
	"bytes"
	"sync"
	"testing"

	"github.com/kvtier/kvtier/paging/check"
)

func TestBuf(t *testing.T) {
	freed := 0
	b := NewBuf([]byte("page"), func(p []byte) {
		if freed++; len(p) != 4 {
			t.Errorf("%d bytes given back", len(p))
		}
	})
	b.Ref().Release()
	if freed != 0 || string(b.Bytes()) != "page" {
		t.Fatalf("given back %d times, bytes %q", freed, b.Bytes())
	}
	b.Release()
	if freed != 1 {
		t.Fatalf("given back %d times", freed)
	}
	for i, misuse := range []func(){func() { b.Ref() }, b.Release, func() { b.Ref() }, b.Release} {
		if !panics(misuse) || freed != 1 {
			t.Errorf("misuse %d after the end does not panic, or gives back again (%d times)", i, freed)
		}
	}
	NewBuf(nil, nil).Release()
}

func TestBufUseAfterFree(t *testing.T) {
	var given []byte
	b := NewBuf(bytes.Repeat([]byte{1}, 64), func(p []byte) { given = p })
	b.Release()
	if got := panics(func() { b.Bytes() }); got != check.Enabled {
		t.Errorf("Bytes after the end panics: %v, want %v", got, check.Enabled)
	}
	if poisoned := given[0] != 1; poisoned != check.Enabled {
		t.Errorf("the memory is overwritten: %v, want %v", poisoned, check.Enabled)
	}
}

func TestBufConcurrently(t *testing.T) {
	var wg sync.WaitGroup
	freed := make(chan struct{}, 2)
	b := NewBuf(make([]byte, 1), func([]byte) { freed <- struct{}{} })
	for range 8 {
		b.Ref()
		wg.Go(func() { // owner: this test; ends after its rounds
			for range 1000 {
				b.Ref().Release()
			}
			b.Release()
		})
	}
	b.Release()
	wg.Wait()
	if len(freed) != 1 {
		t.Errorf("given back %d times", len(freed))
	}
}

func panics(f func()) (yes bool) {
	defer func() { yes = recover() != nil }()
	f()
	return false
}
