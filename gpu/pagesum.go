package gpu

import "math"

// PageSumKernel is the name of the page checksum kernel.
const PageSumKernel = "page_sum"

// PageSum computes the checksum of pages on the device: XXH3-64, seeded with the page's length, over the little-endian
// XXH3-64 values (unseeded) of the page's 64 KiB chunks. It is the sum that a page carries through memory, frames and
// disks. Launch has read the struct and Pages when it returns.
type PageSum struct {
	Pages []Addr // each a multiple of 16; at most MaxBatch
	Bytes int64  // of every page: a positive multiple of 16, at most MaxPageBytes
	Out   Addr   // len(Pages) uint64, a multiple of 8
}

// MaxPageBytes is the largest page that PageSum takes.
const MaxPageBytes = 1 << 30

// ChunkBytes is the size of the pieces that are summed apart, so that one page keeps many processors busy.
const ChunkBytes = 64 << 10

// Name is PageSumKernel.
func (p *PageSum) Name() string { return PageSumKernel }

// Validate reports the first bad argument as an *ArgError.
func (p *PageSum) Validate() error {
	if len(p.Pages) > MaxBatch {
		return sumErr("len(Pages)", int64(len(p.Pages)), "at most 65536", ErrShape)
	}
	if p.Bytes <= 0 || p.Bytes > MaxPageBytes || p.Bytes%rowAlign != 0 {
		return sumErr("Bytes", p.Bytes, "a multiple of 16 from 16 to 2^30", ErrShape)
	}
	if p.Out%8 != 0 {
		return sumErr("Out", int64(p.Out), "a multiple of 8", ErrAlign)
	}
	for _, at := range p.Pages {
		if at%rowAlign != 0 {
			return sumErr("Pages", int64(min(at, math.MaxInt64)), "multiples of 16", ErrAlign)
		}
	}
	return nil
}

// Spans lists the pages and Out.
func (p *PageSum) Spans(yield func(Span) bool) {
	if len(p.Pages) == 0 || !yield(Span{p.Out, int64(len(p.Pages)) * 8, true}) {
		return
	}
	for _, at := range p.Pages {
		if !yield(Span{at, p.Bytes, false}) {
			return
		}
	}
}

func sumErr(arg string, got int64, want string, class error) error {
	return &ArgError{Op: PageSumKernel, Arg: arg, Got: got, Want: want, Err: class}
}
