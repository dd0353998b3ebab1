package rpc

import (
	"bytes"
	"context"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/encoding"
	"google.golang.org/protobuf/proto"

	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

func marshalPiece(t *testing.T, p *pins, data []byte, c kvstatus.Chunk) ([]byte, func()) {
	t.Helper()
	c.Bytes = uint64(len(data))
	b, err := pageCodec{encoding.GetCodecV2("proto")}.Marshal(&piece{Chunk: c, data: data, pins: p})
	if err != nil {
		t.Fatal(err)
	}
	return b.Materialize(), b.Free
}

func TestPieceIsWhatProtobufReads(t *testing.T) {
	for _, data := range [][]byte{{7}, bytes.Repeat([]byte{1, 2, 3}, 5000)} {
		want := kvstatus.Chunk{Block: 9, Part: 63, Offset: 1 << 20, PageBytes: 1 << 21, Sum: ^uint64(0), Bytes: uint64(len(data))}
		b, free := marshalPiece(t, &pins{}, data, want)
		var m kvtierv1.ReadPagesResponse
		if err := proto.Unmarshal(b, &m); err != nil {
			t.Fatal(err)
		}
		free()
		c := m.GetChunk()
		got := kvstatus.Chunk{Block: int(c.GetBlock()), Part: int(c.GetPart()), Offset: c.GetOffset(), PageBytes: c.GetPageBytes(), Sum: c.GetChecksum(), Bytes: uint64(len(c.GetData()))}
		if got != want || !bytes.Equal(c.GetData(), data) {
			t.Errorf("%+v became %+v", want, got)
		}
	}
}

// Pages stay pinned until gRPC has let go of every piece; of a stream that was cut
// a moment longer, whether it does or not.
func TestPinsWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, cut := range []bool{false, true} {
			p := &pins{}
			_, free := marshalPiece(t, p, make([]byte, 4096), kvstatus.Chunk{})
			_, second := marshalPiece(t, p, make([]byte, 4096), kvstatus.Chunk{})
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			start := time.Now()
			free()
			time.AfterFunc(time.Minute, func() {
				if cut {
					cancel() // and the second is never given back
				} else {
					second()
				}
			})
			p.wait(ctx)
			want := time.Minute
			if cut {
				want += letGoWithin
			}
			if got := time.Since(start); got != want {
				t.Errorf("cut %v: waited %v, want %v", cut, got, want)
			}
		}
		new(pins).wait(t.Context()) // nothing was sent
	})
}
