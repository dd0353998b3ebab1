package rpc

import (
	"bytes"
	"context"
	"sync"
	"time"

	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // registers the codec that pageCodec extends
	"google.golang.org/grpc/mem"

	"github.com/kvtier/kvtier/proto/kvstatus"
)

// pageCodec is gRPC's protobuf codec, but for the pieces of pages, which are sent
// from where they lie. The bytes on the wire are the same.
type pageCodec struct{ encoding.CodecV2 }

// Marshal implements encoding.CodecV2.
func (c pageCodec) Marshal(v any) (mem.BufferSlice, error) {
	p, ok := v.(*piece)
	if !ok {
		return c.CodecV2.Marshal(v)
	}
	return mem.BufferSlice{mem.SliceBuffer(p.Head()), p.pins.buffer(p.data)}, nil
}

// piece is a ReadPagesResponse with a piece of a page.
type piece struct {
	kvstatus.Chunk
	data []byte
	pins *pins
}

// pins counts the pieces of one stream that gRPC has yet to copy into what it
// writes. It is the mem.BufferPool that they are given back to.
type pins struct {
	mu   sync.Mutex
	held int
	free chan struct{} // closed when held is 0 again; nil: nobody waits
}

func (p *pins) buffer(data []byte) mem.Buffer {
	if mem.IsBelowBufferPoolingThreshold(cap(data)) { // gRPC would not say when it is done with it
		return mem.SliceBuffer(bytes.Clone(data))
	}
	p.mu.Lock()
	p.held++
	p.mu.Unlock()
	return mem.NewBuffer(&data, p)
}

// Get implements mem.BufferPool. Nothing is taken from here.
func (p *pins) Get(length int) *[]byte {
	b := make([]byte, length)
	return &b
}

// Put implements mem.BufferPool.
func (p *pins) Put(*[]byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.held--; p.held == 0 && p.free != nil {
		close(p.free)
		p.free = nil
	}
}

// letGoWithin bounds the wait for pieces of a stream that was cut. gRPC drops some
// of them without a word, and sends none a moment after the cut: should it, that
// goes to the caller whose pages they were, and does not match the checksum.
const letGoWithin = time.Second

// wait returns when nothing is sent from pages any more: when gRPC has let go of
// every piece, or letGoWithin after ctx, the stream's, has ended.
func (p *pins) wait(ctx context.Context) {
	p.mu.Lock()
	if p.held == 0 {
		p.mu.Unlock()
		return
	}
	free := make(chan struct{})
	p.free = free
	p.mu.Unlock()
	select {
	case <-free:
		return
	case <-ctx.Done():
	}
	late := time.NewTimer(letGoWithin)
	defer late.Stop()
	select {
	case <-free:
	case <-late.C:
	}
}
