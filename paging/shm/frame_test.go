package shm

import (
	"bytes"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func frames() []frame {
	full := make([]Extent, MaxExtents)
	for i := range full {
		full[i] = Extent{ID: 1 + 3, Kind: KindStaging, Bytes: maxExtent, FD: -1}
	}
	return []frame{
		{kind: frameHello, attachment: AttachmentID{1, 2, 3, 15: 9}},
		{kind: frameAck, seq: 1 << 31, count: 64},
		{kind: frameExtents, seq: 5, extents: []Extent{{ID: 1, Kind: KindRAM, Bytes: 1 << 30, FD: -1}}},
		{kind: frameExtents, seq: 6, extents: full},
	}
}

func TestFrames(t *testing.T) {
	for _, f := range frames() {
		b := appendFrame(nil, &f)
		if len(b) > maxFrame {
			t.Errorf("kind %d has %d bytes, more than %d", f.kind, len(b), maxFrame)
		}
		got, err := decodeFrame(b)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(f, *got, cmp.AllowUnexported(frame{})); diff != "" {
			t.Error(diff)
		}
		for n := range b {
			if _, err := decodeFrame(b[:n]); err == nil {
				t.Errorf("kind %d cut to %d bytes is taken", f.kind, n)
			}
		}
		if _, err := decodeFrame(append(b, 0)); err == nil {
			t.Errorf("kind %d with a byte more is taken", f.kind)
		}
	}
}

func FuzzDecodeFrame(f *testing.F) {
	for _, fr := range frames() {
		f.Add(appendFrame(nil, &fr))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		fr, err := decodeFrame(b)
		if err != nil {
			return
		}
		if again := appendFrame(nil, fr); !bytes.Equal(again, b) {
			t.Errorf("%x decodes and encodes to %x", b, again)
		}
	})
}
