package client

import (
	"bytes"
	"errors"
	"testing"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// cut makes a message of buffers of n bytes, as frames cut it.
func cut(b []byte, n int) mem.BufferSlice {
	var s mem.BufferSlice
	for len(b) > 0 {
		end := min(n, len(b))
		s = append(s, mem.SliceBuffer(b[:end]))
		b = b[end:]
	}
	return s
}

func TestOutgoingIsWhatProtobufReads(t *testing.T) {
	page := bytes.Repeat([]byte{1, 2, 3}, 5000)
	for _, p := range []kvstatus.Chunk{
		{Bytes: uint64(len(page))},
		{Block: 3, Part: 63, Offset: 1 << 20, PageBytes: 128 << 20, Bytes: uint64(len(page)), Sum: ^uint64(0)},
	} {
		b, err := pageCodec{}.Marshal(&outgoing{Chunk: p, data: page})
		if err != nil {
			t.Fatal(err)
		}
		var m kvtierv1.WritePagesRequest
		if err := proto.Unmarshal(b.Materialize(), &m); err != nil {
			t.Fatal(err)
		}
		c := m.GetChunk()
		got := kvstatus.Chunk{Block: int(c.GetBlock()), Part: int(c.GetPart()), Offset: c.GetOffset(), PageBytes: c.GetPageBytes(), Bytes: uint64(len(c.GetData())), Sum: c.GetChecksum()}
		if got != p || !bytes.Equal(c.GetData(), page) {
			t.Errorf("%+v became %+v with %d bytes", p, got, len(c.GetData()))
		}
	}
}

// incomingOf is a fetch of two blocks with a part of 4096 and one of 8192 bytes.
func incomingOf() *incoming {
	ns := &namespace{pageBytes: []uint64{4096, 8192}}
	ns.Layout.Parts = []paging.Part{{PageBytes: 4096, BlocksPerPage: 1}, {PageBytes: 8192, BlocksPerPage: 1}}
	l := &link{client: &Client{}}
	return &incoming{lease: &Lease{Parts: 3, cols: 2, link: l}, ns: ns, names: 2}
}

func encoded(t testing.TB, m *kvtierv1.ReadPagesResponse) []byte {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func header(usable uint32) *kvtierv1.ReadPagesResponse {
	return &kvtierv1.ReadPagesResponse{Message: &kvtierv1.ReadPagesResponse_Header{
		Header: &kvtierv1.ReadPagesHeader{UsableBlocks: usable, Tiers: make([]byte, usable), Parts: 3},
	}}
}

func chunk(c *kvtierv1.PageChunk) *kvtierv1.ReadPagesResponse {
	return &kvtierv1.ReadPagesResponse{Message: &kvtierv1.ReadPagesResponse_Chunk{Chunk: c}}
}

func TestIncomingReadsWhatProtobufWrites(t *testing.T) {
	page := bytes.Repeat([]byte{7, 8, 9, 10}, 2048)
	sum := paging.Checksum(page)
	for _, frame := range []int{1, 7, 4096, 1 << 20} {
		in := incomingOf()
		for _, m := range [][]byte{
			encoded(t, header(2)),
			encoded(t, chunk(&kvtierv1.PageChunk{Block: 1, Part: 1, PageBytes: 8192, Checksum: sum, Data: page[:5000]})),
			encoded(t, chunk(&kvtierv1.PageChunk{Block: 1, Part: 1, PageBytes: 8192, Checksum: sum, Data: page[5000:], Offset: 5000})),
		} {
			if err := in.decode(cut(m, frame)); err != nil {
				t.Fatalf("frames of %d: %v", frame, err)
			}
		}
		if got := in.lease.own[3]; !bytes.Equal(got.data, page) || got.sum != sum {
			t.Errorf("frames of %d: page of %d bytes", frame, len(got.data))
		}
	}
}

// FuzzIncoming gives a fetch any messages, cut anyhow: it ends with a typed
// error or has taken only pages whose checksum is right.
func FuzzIncoming(f *testing.F) {
	page := make([]byte, 4096)
	good := encoded(f, chunk(&kvtierv1.PageChunk{PageBytes: 4096, Checksum: paging.Checksum(page), Data: page}))
	f.Add(encoded(f, header(2)), good, uint16(100))
	f.Add(encoded(f, header(1)), encoded(f, header(1)), uint16(1))
	f.Add(encoded(f, header(2)), encoded(f, chunk(&kvtierv1.PageChunk{Offset: 1 << 40, Data: page})), uint16(9))
	f.Add(encoded(f, header(2)), encoded(f, chunk(&kvtierv1.PageChunk{Block: 1 << 31, Part: 64})), uint16(9))
	f.Add([]byte{0x12, 0xff, 0xff, 0xff, 0xff, 0x0f}, []byte{0x12, 3, 0x22, 9, 0}, uint16(2))
	f.Add([]byte{0x0b, 0x0c, 0x00}, []byte{0x0a, 0x80}, uint16(2))
	f.Fuzz(func(t *testing.T, first, second []byte, frame uint16) {
		in := incomingOf()
		for _, m := range [][]byte{first, second} {
			if err := in.decode(cut(m, int(frame)+1)); err != nil {
				if !errors.Is(err, paging.ErrInvalid) {
					t.Fatalf("untyped error: %v", err)
				}
				return
			}
		}
		for _, p := range in.lease.own {
			if p.data != nil && paging.Checksum(p.data) != p.sum {
				t.Fatal("a page with another checksum was taken")
			}
		}
	})
}
