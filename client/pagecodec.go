package client

import (
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // registers the codec that pageCodec extends
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// pageCodec is gRPC's protobuf codec, but for the pieces of pages: one that is
// received is copied once, from the network's buffers to its place in the page,
// and one that is sent is not copied here. The bytes on the wire are the same.
type pageCodec struct{ encoding.CodecV2 }

var pageCall = grpc.ForceCodecV2(pageCodec{encoding.GetCodecV2("proto")})

// Unmarshal gives the messages of ReadPages to the incoming that reads them.
func (c pageCodec) Unmarshal(data mem.BufferSlice, v any) error {
	if in, ok := v.(*incoming); ok {
		return in.decode(data)
	}
	return c.CodecV2.Unmarshal(data, v)
}

// Marshal encodes an outgoing without touching its page, which stays as it is
// until the call has ended: only a call that failed can still be sending it, to
// nobody.
func (c pageCodec) Marshal(v any) (mem.BufferSlice, error) {
	if out, ok := v.(*outgoing); ok {
		return mem.BufferSlice{mem.SliceBuffer(out.Head()), mem.SliceBuffer(out.data)}, nil
	}
	return c.CodecV2.Marshal(v)
}

// outgoing is a WritePagesRequest with a piece of a page.
type outgoing struct {
	kvstatus.Chunk
	data []byte
}

// decode takes one ReadPagesResponse. An error is kept in fault too: gRPC turns
// what a codec returns into a status, which says less.
func (in *incoming) decode(data mem.BufferSlice) error {
	r := data.Reader()
	defer func() { _ = r.Close() }() // gives buffers back, cannot fail
	for r.Remaining() > 0 && in.fault == nil {
		number, kind, bytes, err := field(r)
		if err != nil {
			in.fault = err
			break
		}
		switch {
		case kind == protowire.BytesType && number == kvstatus.FieldHeader:
			in.fault = in.decodeHeader(r, bytes)
		case kind == protowire.BytesType && number == kvstatus.FieldChunk:
			in.fault = in.decodeChunk(data, r, bytes)
		default:
			in.fault = skip(r, bytes)
		}
	}
	return in.fault
}

func (in *incoming) decodeHeader(r *mem.Reader, bytes uint64) error {
	b := make([]byte, bytes)
	if _, err := io.ReadFull(r, b); err != nil {
		return errWire
	}
	h := &kvtierv1.ReadPagesHeader{}
	if proto.Unmarshal(b, h) != nil {
		return errWire
	}
	return in.header(h)
}

// decodeChunk reads the fields of a PageChunk. Its data are passed over, and
// copied from a second reader once everything about them is known: their place
// in the message is the sender's choice.
func (in *incoming) decodeChunk(data mem.BufferSlice, r *mem.Reader, bytes uint64) error {
	var c kvstatus.Chunk
	total, dataAt := data.Len(), 0
	for end := r.Remaining() - int(bytes); r.Remaining() > end; {
		number, kind, value, err := field(r)
		if err != nil {
			return err
		}
		switch {
		case kind == protowire.BytesType && number == kvstatus.FieldData:
			dataAt, c.Bytes = total-r.Remaining(), value
			err = skip(r, value)
		case kind == protowire.BytesType:
			err = skip(r, value)
		default:
			err = set(&c, number, value)
		}
		if err != nil || r.Remaining() < end {
			return errWire
		}
	}
	from := data.Reader()
	defer func() { _ = from.Close() }()
	if err := skip(from, uint64(dataAt)); err != nil {
		return err
	}
	return in.piece(&c, from)
}

func set(c *kvstatus.Chunk, number protowire.Number, value uint64) error {
	switch number {
	case kvstatus.FieldBlock, kvstatus.FieldPart:
		if value > math.MaxInt32 {
			return errWire
		}
		if number == kvstatus.FieldBlock {
			c.Block = int(value)
		} else {
			c.Part = int(value)
		}
	case kvstatus.FieldOffset:
		c.Offset = value
	case kvstatus.FieldPageBytes:
		c.PageBytes = value
	case kvstatus.FieldChecksum:
		c.Sum = value
	}
	return nil
}

var errWire = fmt.Errorf("message of the node is malformed: %w", paging.ErrInvalid)

// field reads a tag and its value: of bytes the length, which is not beyond the
// end of the message.
func field(r *mem.Reader) (protowire.Number, protowire.Type, uint64, error) {
	tag, err := binary.ReadUvarint(r)
	if err != nil {
		return 0, 0, 0, errWire
	}
	number, kind := protowire.DecodeTag(tag)
	if !number.IsValid() {
		return 0, 0, 0, errWire
	}
	var value uint64
	switch kind {
	case protowire.VarintType:
		value, err = binary.ReadUvarint(r)
	case protowire.Fixed64Type:
		var b [8]byte
		_, err = io.ReadFull(r, b[:])
		value = binary.LittleEndian.Uint64(b[:])
	case protowire.Fixed32Type:
		var b [4]byte
		_, err = io.ReadFull(r, b[:])
		value = uint64(binary.LittleEndian.Uint32(b[:]))
	case protowire.BytesType:
		if value, err = binary.ReadUvarint(r); err == nil && value > uint64(r.Remaining()) {
			err = errWire
		}
	default:
		err = errWire
	}
	if err != nil {
		return 0, 0, 0, errWire
	}
	return number, kind, value, nil
}

func skip(r *mem.Reader, bytes uint64) error {
	if bytes > uint64(r.Remaining()) {
		return errWire
	}
	if _, err := r.Discard(int(bytes)); err != nil {
		return errWire
	}
	return nil
}

// frameBytes is the largest HTTP/2 frame that gRPC receives.
const frameBytes = 16 << 10

// framePool hands out the buffers that frames are received in. Unlike gRPC's own
// it does not clear them first, which costs as much as receiving into them.
type framePool struct{ frames sync.Pool }

func newFramePool() *framePool {
	return &framePool{sync.Pool{New: func() any {
		b := make([]byte, frameBytes)
		return &b
	}}}
}

// Get returns a buffer with unspecified content.
func (p *framePool) Get(length int) *[]byte {
	if length > frameBytes {
		b := make([]byte, length)
		return &b
	}
	b, _ := p.frames.Get().(*[]byte)
	*b = (*b)[:length]
	return b
}

// Put takes back what Get returned.
func (p *framePool) Put(b *[]byte) {
	if cap(*b) == frameBytes {
		p.frames.Put(b)
	}
}
