package client

import (
	"context"
	"fmt"
	"os"
	"sync"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/shm"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// poolPlaces is what an extent number of a device pool is taken modulo: the place
// of the extent.
const poolPlaces = 1024

// hostDevice is the kind of device whose memory this process maps like any other.
const hostDevice = "host"

// Pool describes the device pool of the node, in which the slots of leases with
// Wanted TierHBM lie.
//
// All extents have ExtentBytes bytes, and the one with the number n has the place
// n % 1024, below Places. A slot at offset o of an extent at place p is at
// p × ExtentBytes + o of one range of Places × ExtentBytes bytes: see Offset. That
// is a multiple of UnitBytes, so block tables can hold it in units.
type Pool struct {
	Device      string // kind: "host" or "cuda"
	Name        string // of the device, for people
	UUID        []byte // of the device; nil: none
	ExtentBytes int64
	Places      int
	UnitBytes   int64
	// Memory is the whole range, of which what leases name may be read while they
	// are held. nil: the device's memory is not mapped here, see Descriptor.
	Memory []byte

	link         *link
	working      paging.ExtentID // 0: none
	workingBytes int64
}

// Offset is where a slot lies in the range of the pool: that of a page in an
// extent, or behind all of those that of a working page.
func (p *Pool) Offset(s paging.Slot) int64 {
	if p.working != 0 && s.Extent == p.working {
		return int64(p.Places)*p.ExtentBytes + int64(s.Offset)
	}
	return int64(s.Extent%poolPlaces)*p.ExtentBytes + int64(s.Offset)
}

// Descriptor is a new descriptor of an extent, for whoever imports it into a
// device; the caller closes it. It waits a little for one that is on its way.
// ErrInvalid if it does not come, or the extent is none of a pool.
func (p *Pool) Descriptor(ctx context.Context, id paging.ExtentID) (*os.File, error) {
	m, err := p.link.extents.await(ctx, id)
	if err != nil {
		return nil, err
	}
	if m.file == nil {
		return nil, fmt.Errorf("extent %d has no descriptor of its own: %w", id, paging.ErrInvalid)
	}
	return shm.Duplicate(m.file)
}

// Pool is the device pool of the node; ErrUnavailable without a link, ErrInvalid
// if the node has none or Config.DevicePool is not set. It belongs to one
// attachment: ask again after a lease ended with ErrUnavailable.
func (c *Client) Pool() (*Pool, error) {
	l, err := c.attached("pool")
	if err != nil {
		return nil, err
	}
	if l.extents.pool == nil {
		return nil, fmt.Errorf("the node has no HBM tier, or Config.DevicePool is not set: %w", paging.ErrInvalid)
	}
	p := l.extents.pool.Pool
	p.link = l
	return &p, nil
}

// poolRange is the range that a pool is mapped into.
type poolRange struct {
	Pool
	mu     sync.Mutex
	memory *shm.Range // nil: not mapped here
	mapped int        // extents in it
	closed bool       // to be closed when mapped is 0
}

// newPool makes room for the pool that a node announced; nil: there is none.
func newPool(w *kvtierv1.Welcome) (*poolRange, error) {
	for _, a := range w.GetArenas() {
		if a.GetTier() != kvtierv1.Tier_TIER_HBM {
			continue
		}
		p := &poolRange{Pool: Pool{Device: a.GetDevice(), Name: a.GetDeviceName(), UUID: a.GetDeviceUuid(),
			ExtentBytes: int64(a.GetExtentBytes()), Places: int(a.GetPlaces()), UnitBytes: paging.UnitBytes}}
		if p.ExtentBytes <= 0 || p.ExtentBytes%paging.UnitBytes != 0 || p.Places < 1 || p.Places > poolPlaces || p.ExtentBytes > maxPoolBytes/int64(p.Places) {
			return nil, fmt.Errorf("a device pool of %d extents of %d bytes: %w", p.Places, p.ExtentBytes, paging.ErrIncompatible)
		}
		if p.Device == hostDevice {
			var err error
			p.working, p.workingBytes = paging.ExtentID(w.GetWorkingExtent()), int64(w.GetWorkingBytes())
			if p.workingBytes < 0 || p.workingBytes > maxPoolBytes || p.workingBytes%paging.UnitBytes != 0 {
				return nil, fmt.Errorf("%d bytes of working pages: %w", p.workingBytes, paging.ErrIncompatible)
			}
			if p.memory, err = shm.Reserve(int64(p.Places)*p.ExtentBytes + p.workingBytes); err != nil {
				return nil, err
			}
			p.Memory = p.memory.Bytes()
		}
		return p, nil
	}
	return nil, nil
}

// maxPoolBytes bounds the address space of a pool.
const maxPoolBytes = 1 << 44

// addWorking maps the working pages behind the extents, or keeps their descriptor.
func (p *poolRange) addWorking(m *mapping, e *shm.Extent) (err error) {
	if p.memory == nil {
		m.file = e.File()
		return nil
	}
	if e.ID != p.working || e.Bytes != p.workingBytes {
		return fmt.Errorf("working pages of %d bytes in extent %d, announced were %d in %d: %w", e.Bytes, e.ID, p.workingBytes, p.working, paging.ErrInvalid)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return paging.ErrClosed
	}
	if m.mem, err = p.memory.MapReadWrite(int64(p.Places)*p.ExtentBytes, e.FD, e.Bytes); err != nil {
		return err
	}
	e.Discard()
	p.mapped++
	return nil
}

// add maps an extent at its place, or keeps its descriptor.
func (p *poolRange) add(m *mapping, e *shm.Extent) (err error) {
	place := int64(e.ID % poolPlaces)
	if place >= int64(p.Places) || e.Bytes != p.ExtentBytes {
		return fmt.Errorf("extent %d of %d bytes in a pool of %d places of %d: %w", e.ID, e.Bytes, p.Places, p.ExtentBytes, paging.ErrInvalid)
	}
	if p.memory == nil {
		m.file = e.File()
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return paging.ErrClosed
	}
	if m.mem, err = p.memory.MapReadOnly(place*p.ExtentBytes, e.FD, e.Bytes); err != nil {
		return err
	}
	e.Discard()
	p.mapped++
	return nil
}

// gone says that one extent was unmapped.
func (p *poolRange) gone() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mapped--
	p.closeLocked()
}

// close gives the range back when nothing is mapped in it any more.
func (p *poolRange) close() {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	p.closeLocked()
}

func (p *poolRange) closeLocked() {
	if p.closed && p.mapped == 0 && p.memory != nil {
		_ = p.memory.Close() // fails only for what is no mapping
		p.memory = nil
	}
}

// Slot is the place of a page of a lease in the node's memory, for those who hand
// it to a device; false: there is no such page, or the pages are private copies.
func (l *Lease) Slot(row, part int) (paging.Slot, bool) {
	if row < 0 || row >= l.Rows || part < 0 || part >= paging.MaxParts || !l.Parts.Has(part) || l.own != nil || !l.enter() {
		return paging.Slot{}, false
	}
	defer l.leave()
	at := row*l.cols + (l.Parts & paging.AllParts(part)).Len()
	s, err := paging.DecodeSlot(l.slots[at*paging.SlotBytes:])
	return s, err == nil && s.Bytes != 0
}
