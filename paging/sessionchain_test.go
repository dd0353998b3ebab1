package paging

import (
	"encoding/binary"
	"errors"
	"testing"

	"github.com/zeebo/blake3"
)

func sessionNames(n int) []BlockName {
	names := make([]BlockName, n)
	for i := range names {
		binary.LittleEndian.PutUint64(names[i][:], uint64(i)+1)
	}
	return names
}

// However a chain grows, its end is that of its names, by the plain hash of them all.
func TestSessionChainIsTheHashOfItsNames(t *testing.T) {
	names := sessionNames(3*SegmentBlocks + 7)
	plain := func(n int) [32]byte {
		var b []byte
		for _, name := range names[:n] {
			b = append(b, name[:]...)
		}
		return blake3.Sum256(b)
	}
	for _, step := range []int{1, 7, SegmentBlocks, SegmentBlocks + 1, len(names)} {
		c := NewSessionChain()
		for at := 0; at < len(names); at += step {
			c.Append(names[at:min(at+step, len(names))], uint64(16*(min(at+step, len(names))-at)))
		}
		want := SessionEnd{Blocks: uint64(len(names)), Tokens: uint64(16 * len(names)), Tip: names[len(names)-1], Hash: plain(len(names)), SegmentHash: plain(3 * SegmentBlocks)}
		if c.End() != want {
			t.Errorf("by %d: %+v, want %+v", step, c.End(), want)
		}
	}
	if end := NewSessionChain().Append(nil, 0); end != (SessionEnd{}) {
		t.Errorf("no block: %+v", end)
	}
}

func TestProveSession(t *testing.T) {
	names := sessionNames(2*SegmentBlocks + 5)
	c := NewSessionChain()
	end := c.Append(names, 1)
	wrong := func(at int) []BlockName {
		out := append([]BlockName(nil), names...)
		out[at][31]++
		return out
	}
	for what, x := range map[string]struct {
		names []BlockName
		want  uint64
	}{
		"all":                         {names, 2*SegmentBlocks + 5},
		"more than all":               {append(names[:len(names):len(names)], BlockName{9}), 2*SegmentBlocks + 5},
		"the open segment is lost":    {names[:2*SegmentBlocks], 2 * SegmentBlocks},
		"half of the open segment":    {names[:2*SegmentBlocks+2], 2 * SegmentBlocks},
		"a full segment is lost":      {names[:2*SegmentBlocks-1], 0},
		"nothing":                     {nil, 0},
		"another block in the open":   {wrong(2*SegmentBlocks + 1), 2 * SegmentBlocks},
		"another block in a full one": {wrong(3), 0},
	} {
		if got := ProveSession(x.names, end); got != x.want {
			t.Errorf("%s: %d blocks proved, want %d", what, got, x.want)
		}
	}
	short := NewSessionChain()
	if got := ProveSession(names[:3], short.Append(names[:3], 1)); got != 3 {
		t.Errorf("a short session: %d", got)
	}
	fork, err := c.Fork(SegmentBlocks+1, 9)
	if err != nil || fork.End().Blocks != SegmentBlocks+1 || ProveSession(names, fork.End()) != SegmentBlocks+1 {
		t.Errorf("fork: %+v, %v", fork, err)
	}
	if _, err := c.Fork(end.Blocks+1, 0); !errors.Is(err, ErrInvalid) {
		t.Errorf("a fork longer than the chain: %v", err)
	}
	if got, err := c.Names(1, 3); err != nil || len(got) != 2 || got[0] != names[1] {
		t.Errorf("names: %v, %v", got, err)
	}
}
