package main

import (
	"io"
	"os"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
	"golang.org/x/sys/unix"
)

// progress shows how far a workload is: a bar on a terminal, nothing elsewhere.
type progress struct {
	name  string
	pool  *mpb.Progress
	bar   *mpb.Bar
	total int64
}

// newProgress draws on w if it is a terminal.
func newProgress(w io.Writer, name string) *progress {
	p := &progress{name: name}
	if f, ok := w.(*os.File); ok && isTerminal(f) {
		p.pool = mpb.New(mpb.WithOutput(w), mpb.WithWidth(48))
	}
	return p
}

func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS) //nolint:gosec // descriptors are small
	return err == nil
}

// update is given to workloads as their Progress; one goroutine calls it at a time.
func (p *progress) update(done, total int64) {
	if p.pool == nil {
		return
	}
	if p.bar == nil {
		p.total = total
		p.bar = p.pool.New(total, mpb.BarStyle(),
			mpb.PrependDecorators(decor.Name(p.name+" "), decor.CountersNoUnit("%d / %d")),
			mpb.AppendDecorators(decor.Percentage(), decor.Name(" "), decor.AverageETA(decor.ET_STYLE_MMSS)),
			mpb.BarRemoveOnComplete())
	}
	p.bar.SetCurrent(done)
}

// close takes the bar away.
func (p *progress) close() {
	if p.pool == nil {
		return
	}
	if p.bar != nil {
		p.bar.Abort(true)
	}
	p.pool.Wait()
}
