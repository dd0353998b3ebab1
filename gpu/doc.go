// Package gpu describes a device that holds page bytes and computes on them: memory, streams, fences, batched copies,
// exported pools and paged attention. It knows addresses and bytes and nothing of keys, blocks or tiers.
//
// Two drivers implement [Device]: gpu/host, a memfd pool that behaves like device memory and is always there, and
// gpu/cuda, found at run time. Both pass the suite in gpu/gputest, so code written against one runs on the other.
//
// # Ordering
//
// Work on one [Stream] runs in the order it was queued. Work on two streams has no order at all until one of them waits
// for a [Fence] of the other ([Stream.Wait]) or for a timeline slot ([Stream.Await]). The host sees the effect of queued
// work only after it waited for a fence recorded behind that work: [Fence.Wait] or [Sync].
//
// # Lifetimes
//
// A [Mem] lives until its Free. Free refuses with [ErrBusy] while queued work names the memory, so nothing is ever taken
// from under a kernel; wait for a fence behind the last use first. An address outside living memory is [ErrFault] when
// the work is queued. Slices and structs passed to a call are borrowed until it returns and never modified, except where
// a method says otherwise.
//
// # Failure
//
// Bad arguments change nothing and are [ErrArgument] (as [*ArgError], which names the argument). When the device itself
// fails, every later call and every unfinished fence reports [ErrLost]; only Free and Close still work.
//
// # Concurrency
//
// Every method of a Device, Mem, Stream or Fence may be called from any goroutine. Two goroutines that queue on the same
// stream get some order; use one stream per goroutine where the order matters.
//
// # Example
//
//	pool, err := dev.Alloc(1<<30, gpu.Pool)       // exported to engines, read-only for them
//	arena, err := dev.Register(ram)               // host memory that the device may copy from
//	s, err := dev.NewStream()
//	err = s.Copy([]gpu.Copy{{Dst: pool.Addr(), Src: arena.Addr(), Bytes: pageBytes}})
//	err = gpu.Sync(ctx, s)                        // the page is in the pool now
package gpu
