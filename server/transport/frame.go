package transport

import (
	"encoding/binary"
	"fmt"
	"io"

	"github.com/kvtier/kvtier/paging"
)

// The protocol's versions. A node speaks its own and the one before.
const (
	Version       = 1
	oldestVersion = 1
)

// frameKind says what a frame is.
type frameKind uint8

// Frames of bulk connections; requests and cancels come from the node that
// fetches, the others from the source.
const (
	frameRequest frameKind = 1 // payload: PageRequest
	frameCancel  frameKind = 2 // the rest of the request is not wanted
	framePage    frameKind = 3 // payload: bytes of page index at offset; value: checksum of the page
	frameMissing frameKind = 4 // payload: pages that do not come, and why
	frameEnd     frameKind = 5 // nothing more of this request; flags: why, for the pages not answered; value: bytes that the source owes
	frameBeat    frameKind = 6 // the source is alive and owes something
)

// Frames of control connections.
const (
	frameHave  frameKind = 16 // payload: HaveRequest
	frameHeld  frameKind = 17 // payload: parts held, per block
	frameCall  frameKind = 18 // payload: a method byte and its argument
	frameReply frameKind = 19 // payload: the answer, or the text of an error; flags: its code
	framePing  frameKind = 20
	framePong  frameKind = 21 // value: bytes that the source owes
	frameDoubt frameKind = 22 // payload: a page whose copy failed its checksum; not answered
)

// Bounds of the protocol.
const (
	headerBytes      = 40
	framePageBytes   = 1 << 20  // of page bytes in a frame; a multiple of paging.ChunkBytes
	maxLotBytes      = 8 << 20  // page bytes of a request, unless it asks for one page
	maxRequestBlocks = 1024     // of a request
	maxRequestPages  = 4096     // of a request
	maxRequestBytes  = 64 << 10 // of its payload
	maxHaveBlocks    = 4096     // of one question
	maxHaveBytes     = 40 + 32*maxHaveBlocks
	maxHeldBytes     = 9 * maxHaveBlocks
	maxMissingBytes  = 8 * maxRequestPages
	doubtBytes       = 32 + 32 + 8

	// MaxCallBytes bounds the argument and the answer of a Call.
	MaxCallBytes = 1 << 20
)

// header is the fixed part of every frame.
type header struct {
	kind    frameKind
	flags   uint8
	length  uint32 // of the payload that follows
	request uint64
	index   uint32 // page in the request
	offset  uint32 // in the page
	value   uint64 // page frames: checksum of the page; other frames with a payload: of the payload
}

// put encodes h into the first headerBytes of b:
//
//	0 kind, 1 flags, 2 zero, 4 length, 8 request, 16 index, 20 offset, 24 value, 32 checksum of the 32 bytes before
func (h *header) put(b []byte) {
	_ = b[headerBytes-1]
	b[0], b[1], b[2], b[3] = byte(h.kind), h.flags, 0, 0
	binary.LittleEndian.PutUint32(b[4:], h.length)
	binary.LittleEndian.PutUint64(b[8:], h.request)
	binary.LittleEndian.PutUint32(b[16:], h.index)
	binary.LittleEndian.PutUint32(b[20:], h.offset)
	binary.LittleEndian.PutUint64(b[24:], h.value)
	binary.LittleEndian.PutUint64(b[32:], paging.Checksum(b[:32]))
}

// parseHeader decodes the first headerBytes of b. paging.ErrCorrupt if their
// checksum is wrong.
func parseHeader(b []byte) (header, error) {
	h := header{
		kind:    frameKind(b[0]),
		flags:   b[1],
		length:  binary.LittleEndian.Uint32(b[4:]),
		request: binary.LittleEndian.Uint64(b[8:]),
		index:   binary.LittleEndian.Uint32(b[16:]),
		offset:  binary.LittleEndian.Uint32(b[20:]),
		value:   binary.LittleEndian.Uint64(b[24:]),
	}
	if binary.LittleEndian.Uint64(b[32:]) != paging.Checksum(b[:32]) || b[2]|b[3] != 0 {
		return h, fmt.Errorf("frame header: %w", paging.ErrCorrupt)
	}
	return h, nil
}

// role is one end of a kind of connection: it says which frames may arrive.
type role uint8

const (
	bulkSource role = iota // reads requests
	bulkTarget             // reads pages
	controlSource
	controlTarget
)

// most is the longest payload that a frame of this kind may have for a reader
// in this role; false: it may not arrive at all.
func (r role) most(k frameKind) (bytes uint32, ok bool) {
	switch r {
	case bulkSource:
		switch k {
		case frameRequest:
			return maxRequestBytes, true
		case frameCancel:
			return 0, true
		}
	case bulkTarget:
		switch k {
		case framePage:
			return framePageBytes, true
		case frameMissing:
			return maxMissingBytes, true
		case frameEnd, frameBeat:
			return 0, true
		}
	case controlSource:
		switch k {
		case frameHave:
			return maxHaveBytes, true
		case frameCall:
			return 1 + MaxCallBytes, true
		case frameDoubt:
			return doubtBytes, true
		case framePing:
			return 0, true
		}
	case controlTarget:
		switch k {
		case frameHeld:
			return maxHeldBytes, true
		case frameReply:
			return MaxCallBytes, true
		case framePong:
			return 0, true
		}
	}
	return 0, false
}

// readHeader reads a header that may arrive in this role, with scratch of
// headerBytes. What it returns is checked against the bounds of the protocol.
func readHeader(r io.Reader, as role, scratch []byte) (header, error) {
	if _, err := io.ReadFull(r, scratch[:headerBytes]); err != nil {
		return header{}, err
	}
	h, err := parseHeader(scratch)
	if err != nil {
		return h, err
	}
	most, ok := as.most(h.kind)
	switch {
	case !ok:
		return h, fmt.Errorf("frame of kind %d does not belong here: %w", h.kind, paging.ErrInvalid)
	case h.length > most:
		return h, fmt.Errorf("frame of kind %d with %d bytes, more than %d: %w", h.kind, h.length, most, paging.ErrInvalid)
	}
	return h, nil
}

// readPayload reads and checks the payload of a frame that is not a page's. It
// reuses buf if that is long enough.
func readPayload(r io.Reader, h *header, buf []byte) ([]byte, error) {
	if uint32(cap(buf)) < h.length {
		buf = make([]byte, h.length)
	}
	buf = buf[:h.length]
	if _, err := io.ReadFull(r, buf); err != nil {
		return buf, err
	}
	if h.length > 0 && paging.Checksum(buf) != h.value {
		return buf, fmt.Errorf("payload of a frame of kind %d: %w", h.kind, paging.ErrCorrupt)
	}
	return buf, nil
}

// appendFrame appends a frame that is not a page's; with a payload it sets h.value.
func appendFrame(b []byte, h header, payload []byte) []byte {
	h.length = uint32(len(payload))
	if len(payload) > 0 {
		h.value = paging.Checksum(payload)
	}
	at := len(b)
	b = append(b, make([]byte, headerBytes)...)
	h.put(b[at:])
	return append(b, payload...)
}
