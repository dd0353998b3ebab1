package gputest

import (
	"bytes"
	"fmt"

	"github.com/kvtier/kvtier/gpu"
)

func testExportPool(e *env) {
	defer e.done()
	s, pool, private := e.stream(), e.alloc(1<<20, gpu.Pool), e.alloc(4096, gpu.Private)
	_, err := private.Export()
	e.want(err, gpu.ErrUnsupported, "export of private memory")
	want := random(rng(5, 6), int(pool.Size()))
	e.put(s, pool.Addr(), want)

	f, err := pool.Export()
	e.ok(err)
	view, err := e.dev.Import(f, pool.Size(), gpu.ReadOnly)
	e.ok(err)
	e.ok(f.Close())
	if view.Size() != pool.Size() {
		e.Errorf("imported %d of %d bytes", view.Size(), pool.Size())
	}
	if got := e.get(s, view.Addr(), len(want)); !bytes.Equal(got, want) {
		e.Error("the importer reads other bytes")
	}
	e.ok(s.Fill(pool.Addr(), 4096, 9)) // what the owner writes later is seen in place
	if got := e.get(s, view.Addr(), 4096); got[0] != 9 || got[4095] != 9 {
		e.Error("the importer holds a copy")
	}
	e.want(s.Fill(view.Addr(), 16, 1), gpu.ErrFault, "write through a read-only import")
	_, err = view.Export()
	e.want(err, gpu.ErrUnsupported, "export of an import")
	if e.dev.Info().ReadOnlyPools {
		f, err := pool.Export()
		e.ok(err)
		_, err = e.dev.Import(f, pool.Size(), gpu.ReadWrite)
		e.want(err, gpu.ErrArgument, "writable import of a read-only pool")
		e.ok(f.Close())
	}
	e.closeAll(s)
	e.free(view, pool, private)
}

func testExportShared(e *env) {
	defer e.done()
	s, shared := e.stream(), e.alloc(65536, gpu.Shared)
	f, err := shared.Export()
	e.ok(err)
	for _, size := range []int64{0, -4096, shared.Size() + e.dev.Info().GranuleBytes} {
		_, err := e.dev.Import(f, size, gpu.ReadWrite)
		e.want(err, gpu.ErrArgument, fmt.Sprintf("import of %d bytes", size))
	}
	view, err := e.dev.Import(f, shared.Size(), gpu.ReadWrite)
	e.ok(err)
	e.ok(f.Close())
	e.ok(s.Fill(view.Addr(), 16, 3))
	e.ok(s.Fill(shared.Addr()+16, 16, 4))
	want := append(bytes.Repeat([]byte{3}, 16), bytes.Repeat([]byte{4}, 16)...)
	for name, m := range map[string]gpu.Mem{"owner": shared, "importer": view} {
		if got := e.get(s, m.Addr(), 32); !bytes.Equal(got, want) {
			e.Errorf("%s reads % x", name, got)
		}
	}
	// A slot raised on one side ends a wait on the other.
	e.ok(s.Fill(shared.Addr(), 8, 0))
	e.sync(s)
	e.ok(s.Await(view.Addr(), 1))
	e.release(shared.Addr(), 1)
	e.sync(s)
	e.closeAll(s)
	e.free(view, shared)
}

func testPoolOutlivesExporter(e *env) {
	defer e.done()
	if e.PoolsEnd {
		e.Skip("pools of this device end with their exporter")
	}
	s, pool := e.stream(), e.alloc(65536, gpu.Pool)
	size := pool.Size()
	e.ok(s.Fill(pool.Addr(), size, 0x42))
	e.sync(s)
	f, err := pool.Export()
	e.ok(err)
	view, err := e.dev.Import(f, size, gpu.ReadOnly)
	e.ok(err)
	e.free(pool)
	if got := e.get(s, view.Addr(), 65536); bytes.Count(got, []byte{0x42}) != 65536 {
		e.Error("an importer lost the memory when its exporter freed it")
	}
	late, err := e.dev.Import(f, size, gpu.ReadOnly) // the descriptor alone keeps it too
	e.ok(err)
	e.ok(f.Close())
	if got := e.get(s, late.Addr(), 1)[0]; got != 0x42 {
		e.Errorf("a late importer reads %#x", got)
	}
	e.closeAll(s)
	e.free(view, late)
}
