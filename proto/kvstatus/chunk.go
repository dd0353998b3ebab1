package kvstatus

import "google.golang.org/protobuf/encoding/protowire"

// Numbers of the fields of a page stream, as in pages.proto.
const (
	FieldHeader = 1 // of ReadPagesResponse
	FieldChunk  = 2 // of ReadPagesResponse and WritePagesRequest

	FieldBlock     = 1 // of PageChunk
	FieldPart      = 2
	FieldOffset    = 3
	FieldData      = 4
	FieldPageBytes = 5
	FieldChecksum  = 6
)

// Chunk is a PageChunk without its bytes.
type Chunk struct {
	Block, Part              int
	Offset, PageBytes, Bytes uint64 // where the bytes lie, of what, how many
	Sum                      uint64
}

// Head encodes a ReadPagesResponse or WritePagesRequest with this chunk, up to the
// bytes of the page, which come last: they need not be copied to be sent.
func (c *Chunk) Head() []byte {
	var fields []byte
	fields = protowire.AppendVarint(protowire.AppendTag(fields, FieldBlock, protowire.VarintType), uint64(c.Block))
	fields = protowire.AppendVarint(protowire.AppendTag(fields, FieldPart, protowire.VarintType), uint64(c.Part))
	fields = protowire.AppendVarint(protowire.AppendTag(fields, FieldOffset, protowire.VarintType), c.Offset)
	fields = protowire.AppendVarint(protowire.AppendTag(fields, FieldPageBytes, protowire.VarintType), c.PageBytes)
	fields = protowire.AppendFixed64(protowire.AppendTag(fields, FieldChecksum, protowire.Fixed64Type), c.Sum)
	fields = protowire.AppendVarint(protowire.AppendTag(fields, FieldData, protowire.BytesType), c.Bytes)
	head := protowire.AppendTag(nil, FieldChunk, protowire.BytesType)
	head = protowire.AppendVarint(head, uint64(len(fields))+c.Bytes)
	return append(head, fields...)
}
