package hbm

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/kvtier/kvtier/gpu"
	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
)

// Gather implements tier.Engines.
func (a *Arena) Gather(pages []tier.Page, from [][]tier.Span, refs []tier.Ref, host [][]byte, errs []error) {
	a.use.RLock()
	defer a.use.RUnlock()
	if a.refuseClosed(errs) {
		return
	}
	items := make([]item, len(pages))
	for i, p := range pages {
		items[i] = item{bytes: int64(p.Bytes), any: true, dst: host[i]}
		if refs[i] != 0 {
			items[i].slot = a.Addr(refs[i])
			items[i].from = copies(items[i].slot, from[i], true)
		} else {
			items[i].from = from2host(from[i])
			items[i].only = true
		}
	}
	a.moveEach(items, errs)
	for i := range pages {
		pages[i].Sum = items[i].sum
	}
}

// from2host is spans as copies whose destination the lane fills in.
func from2host(from []tier.Span) []gpu.Copy {
	out := make([]gpu.Copy, len(from))
	for i, s := range from {
		out[i] = gpu.Copy{Src: gpu.Addr(s.Addr), Bytes: s.Bytes}
	}
	return out
}

// copies moves between a page that lies in one piece at an address and its spans.
func copies(at gpu.Addr, spans []tier.Span, in bool) []gpu.Copy {
	out := make([]gpu.Copy, len(spans))
	for i, s := range spans {
		if out[i] = (gpu.Copy{Dst: at, Src: gpu.Addr(s.Addr), Bytes: s.Bytes}); !in {
			out[i].Dst, out[i].Src = out[i].Src, out[i].Dst
		}
		at += gpu.Addr(s.Bytes)
	}
	return out
}

// Scatter implements tier.Engines.
func (a *Arena) Scatter(pages []tier.Page, refs []tier.Ref, host [][]byte, to [][]tier.Span, errs []error) {
	a.use.RLock()
	defer a.use.RUnlock()
	if a.refuseClosed(errs) {
		return
	}
	items := make([]item, len(refs))
	for i := range refs {
		it := item{scatter: to[i], src: host[i], bytes: int64(pages[i].Bytes), want: pages[i].Sum}
		switch {
		case refs[i] != 0:
			it.slot, it.src = a.Addr(refs[i]), nil
		case len(to[i]) == 1 && to[i][0].Addr%16 == 0 && summable(it.bytes):
			it.slot = gpu.Addr(to[i][0].Addr)
		default:
			it.only = true
		}
		items[i] = it
	}
	a.moveEach(items, errs)
}

func (a *Arena) refuseClosed(errs []error) bool {
	for i := range errs {
		errs[i] = nil
		if a.closed {
			errs[i] = paging.ErrClosed
		}
	}
	return a.closed
}

// moveEach is move, and if an engine named memory that the device does not know,
// once more page by page: the fault of one is not that of the others.
func (a *Arena) moveEach(items []item, errs []error) {
	a.move(context.Background(), items, errs)
	if len(items) < 2 || !errors.Is(errs[0], paging.ErrInvalid) {
		return
	}
	for i := range items {
		a.move(context.Background(), items[i:i+1], errs[i:i+1])
	}
}

// shared implements tier.Shared.
type shared struct {
	arena *Arena
	mem   gpu.Mem
	file  *os.File // nil: the engine's
	bytes int64    // of the budget
}

// NewWorking makes memory that both sides write, inside the part of the budget
// that is kept for it. paging.ErrNoSpace if that is used up.
func (a *Arena) NewWorking(bytes int64) (tier.Shared, error) {
	granule := max(a.cfg.Device.Info().GranuleBytes, paging.UnitBytes)
	bytes = (bytes + granule - 1) / granule * granule
	if err := a.SetAside(bytes); err != nil {
		return nil, err
	}
	m, err := a.cfg.Device.Alloc(bytes, gpu.Shared)
	if err != nil {
		a.GiveBack(bytes)
		return nil, fmt.Errorf("working pages: %w", deviceError(err))
	}
	f, err := m.Export()
	if err != nil {
		a.GiveBack(bytes)
		return nil, fmt.Errorf("working pages: %w", errors.Join(deviceError(err), m.Free()))
	}
	return &shared{arena: a, mem: m, file: f, bytes: bytes}, nil
}

// NewRegion takes memory of an engine on this device, of exactly bytes bytes, that
// it exported; f is borrowed. It stays valid when its engine is gone. paging.ErrInvalid
// if it cannot be mapped for writing or could be resized.
func (a *Arena) NewRegion(f *os.File, bytes int64) (tier.Shared, error) {
	m, err := a.cfg.Device.Import(f, bytes, gpu.ReadWrite)
	if err != nil {
		return nil, fmt.Errorf("import a region of %d bytes: %w", bytes, deviceError(err))
	}
	return &shared{arena: a, mem: m}, nil
}

// Addr implements tier.Shared.
func (s *shared) Addr() uint64 { return uint64(s.mem.Addr()) }

// Bytes implements tier.Shared.
func (s *shared) Bytes() int64 { return s.mem.Size() }

// FD implements tier.Shared.
func (s *shared) FD() int {
	if s.file == nil {
		return -1
	}
	return int(s.file.Fd())
}

// Close implements tier.Shared.
func (s *shared) Close() error {
	var err error
	if s.file != nil {
		err = s.file.Close()
	}
	err = errors.Join(err, s.mem.Free())
	s.arena.GiveBack(s.bytes)
	return err
}
