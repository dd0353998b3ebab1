package bench

import (
	"errors"
	"testing"

	"github.com/kvtier/kvtier/gpu/host"
	"github.com/kvtier/kvtier/paging"
)

func TestDeviceMeasuresWhatItCopies(t *testing.T) {
	d, err := host.Open(host.Config{MemoryBytes: 64 << 20, PageSum: paging.Checksum})
	if err != nil {
		t.Fatal(err)
	}
	rep, err := Device(t.Context(), DeviceConfig{Device: d, Bytes: 8 << 20, Rounds: 1})
	if err := errors.Join(err, d.Close()); err != nil {
		t.Fatal(err)
	}
	if rep.Driver != "host" || len(rep.Copies) != len(devicePages) || rep.Err() != nil {
		t.Errorf("%+v, %v", rep, rep.Err())
	}
	for _, c := range rep.Copies {
		if !(c.UpRatio > 0) || !(c.DownRatio > 0) || !(c.ChecksumsPerS > 0) || c.WrongChecksums != 0 {
			t.Errorf("%+v", c)
		}
	}
	// A device with other sums is found out.
	wrong, err := host.Open(host.Config{MemoryBytes: 64 << 20, PageSum: func(page []byte) uint64 { return paging.Checksum(page) + 1 }})
	if err != nil {
		t.Fatal(err)
	}
	rep, err = Device(t.Context(), DeviceConfig{Device: wrong, Bytes: 4 << 20, Rounds: 1})
	if err := errors.Join(err, wrong.Close()); err != nil {
		t.Fatal(err)
	}
	if rep.Err() == nil {
		t.Error("wrong sums were not counted")
	}
}

func TestContentOfKeysAndValues(t *testing.T) {
	c := Content{Seed: 7, KV: true}
	page := make([]byte, 4096)
	id := paging.PageID{Part: 1}
	c.Fill(page, id)
	if at := c.Check(page, id); at != -1 {
		t.Errorf("its own page differs at %d", at)
	}
	id.Part = 2
	if c.Check(page, id) < 0 {
		t.Error("another page counts as this one")
	}
	for i := 0; i < len(page); i += 2 {
		if exponent := uint16(page[i]) | uint16(page[i+1])<<8; exponent&0x7f80 != 0x3f00 {
			t.Fatalf("element %d is %#x", i/2, exponent)
		}
	}
	page[100] ^= 1
	id.Part = 1
	if at := c.Check(page, id); at != 96 {
		t.Errorf("a flipped bit was found at %d, want 96", at)
	}
}
