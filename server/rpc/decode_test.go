package rpc

import (
	"bytes"
	"encoding/binary"
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

func packedNames(n int) []byte {
	b := make([]byte, 32*n)
	for i := range n {
		b[32*i], b[32*i+1], b[32*i+2] = byte(i), byte(i>>8), byte(i>>16)
	}
	return b
}

func TestPackedNames(t *testing.T) {
	repeated := append(packedNames(3), packedNames(2)[32:]...)
	for _, c := range []struct {
		name string
		b    []byte
		want string // part of the error; empty: fine
	}{
		{"one", packedNames(1), ""},
		{"most", packedNames(65536), ""},
		{"none", nil, "at least one"},
		{"too many", packedNames(65537), "at most 65536"},
		{"cut", packedNames(2)[:63], "multiple of 32"},
		{"repeated", repeated, "block 3 repeats block 1"},
	} {
		var s scratch
		names, err := s.packed(c.b)
		if c.want == "" {
			if err != nil || len(names) != len(c.b)/32 {
				t.Errorf("%s: %d names, %v", c.name, len(names), err)
			}
			continue
		}
		if !errors.Is(err, paging.ErrInvalid) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want ErrInvalid with %q", c.name, err, c.want)
		}
	}
}

func TestRepeatsAreFoundInAnyOrderOfCalls(t *testing.T) {
	var s scratch
	for n := 2; n < 300; n++ {
		b := packedNames(n)
		copy(b[32*(n-1):], b[:32]) // the last repeats the first
		if _, err := s.packed(b); err == nil {
			t.Fatalf("%d names: a repetition was not found", n)
		}
		if _, err := s.packed(packedNames(n)); err != nil {
			t.Fatalf("%d names: %v", n, err)
		}
	}
}

// Names that were chosen to collide cost little more than others.
func TestRepeatsWithChosenNames(t *testing.T) {
	b := make([]byte, 32*65536)
	for i := range 65536 {
		b[32*i+20], b[32*i+21], b[32*i+22] = byte(i), byte(i>>8), byte(i>>16) // the bits that spread names are all alike
	}
	var s scratch
	start := time.Now()
	if _, err := s.packed(b); err != nil {
		t.Error(err)
	}
	if d := time.Since(start); d > time.Second { // 2^31 comparisons would take many
		t.Errorf("65,536 names that collide took %v", d)
	}
	copy(b[32*65000:], b[32*3:32*4])
	if _, err := s.packed(b); !errors.Is(err, paging.ErrInvalid) {
		t.Errorf("a repetition among names that collide: %v", err)
	}
}

func BenchmarkRepeats64(bench *testing.B) {
	names, err := appendNames(nil, packedNames(64))
	if err != nil {
		bench.Fatal(err)
	}
	for i := range names {
		binary.LittleEndian.PutUint64(names[i][8:], uint64(i)*0x9e3779b97f4a7c15)
	}
	var r repeats
	bench.ReportAllocs()
	for bench.Loop() {
		if _, _, found := r.find(names); found {
			bench.Fatal("found")
		}
	}
}

func TestDuration(t *testing.T) {
	const def, most = time.Second, time.Minute
	for _, c := range []struct {
		d    *durationpb.Duration
		want time.Duration // -1: an error
	}{
		{nil, def},
		{durationpb.New(0), def},
		{durationpb.New(most), most},
		{durationpb.New(most + 1), -1},
		{durationpb.New(-1), -1},
		{&durationpb.Duration{Seconds: 1, Nanos: -5}, -1},
		{&durationpb.Duration{Seconds: 1 << 62}, -1},
	} {
		got, err := duration("timeout", c.d, def, most)
		if c.want < 0 {
			if !errors.Is(err, paging.ErrInvalid) {
				t.Errorf("%v: got %v, %v, want an error", c.d, got, err)
			}
			continue
		}
		if err != nil || got != c.want {
			t.Errorf("%v: got %v, %v, want %v", c.d, got, err, c.want)
		}
	}
}

func TestHello(t *testing.T) {
	secret := bytes.Repeat([]byte{1}, 16)
	long := strings.Repeat("x", 65)
	for _, c := range []struct {
		name string
		h    *kvtierv1.Hello
		want error
	}{
		{"plain", &kvtierv1.Hello{ProtocolVersion: 1}, nil},
		{"newer", &kvtierv1.Hello{ProtocolVersion: 9}, nil},
		{"group", &kvtierv1.Hello{ProtocolVersion: 1, GroupId: "g", GroupSecret: secret}, nil},
		{"none", nil, paging.ErrIncompatible},
		{"no version", &kvtierv1.Hello{}, paging.ErrIncompatible},
		{"long name", &kvtierv1.Hello{ProtocolVersion: 1, Engine: long}, paging.ErrInvalid},
		{"secret alone", &kvtierv1.Hello{ProtocolVersion: 1, GroupSecret: secret}, paging.ErrInvalid},
		{"group without secret", &kvtierv1.Hello{ProtocolVersion: 1, GroupId: "g"}, paging.ErrInvalid},
		{"short secret", &kvtierv1.Hello{ProtocolVersion: 1, GroupId: "g", GroupSecret: secret[:15]}, paging.ErrInvalid},
		{"bad previous", &kvtierv1.Hello{ProtocolVersion: 1, PreviousAttachment: secret[:3]}, paging.ErrInvalid},
	} {
		if _, err := hello(c.h); !errors.Is(err, c.want) {
			t.Errorf("%s: got %v, want %v", c.name, err, c.want)
		}
	}
}

// Whatever arrives is decoded or refused with ErrInvalid, within the bounds.
func FuzzFetchRequest(f *testing.F) {
	f.Add(packedNames(1), packedNames(3), int64(5), int32(0), uint32(2))
	f.Add(packedNames(2), packedNames(1)[:31], int64(-5), int32(7), uint32(9))
	f.Fuzz(func(t *testing.T, ns, names []byte, timeout int64, nanos int32, mode uint32) {
		m := &kvtierv1.FetchRequest{
			NamespaceId: ns, BlockNames: names, Timeout: &durationpb.Duration{Seconds: timeout, Nanos: nanos},
			Mode: kvtierv1.FetchMode(mode), WantedTier: kvtierv1.Tier(mode >> 8),
		}
		var s scratch
		var r FetchRequest
		err := s.fetch(m, &r)
		switch {
		case err != nil && !errors.Is(err, paging.ErrInvalid):
			t.Errorf("%v is not ErrInvalid", err)
		case err == nil && (len(r.Names) == 0 || len(r.Names) > paging.MaxCallBlocks || r.Timeout < 0 || r.Timeout > maxFetchTime):
			t.Errorf("accepted %d names, timeout %v", len(r.Names), r.Timeout)
		}
	})
}
