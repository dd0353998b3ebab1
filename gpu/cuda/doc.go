// Package cuda is the device of NVIDIA's driver, found at run time: no cgo, no CUDA headers, no toolkit. The library is
// opened by name, and each entry point is asked for by the version whose calling convention is coded here, so that a
// later driver cannot change it under us.
//
// The driver's current context belongs to an OS thread and goroutines move between threads, so every call that needs one
// runs inside Device.do. Pools are made by the virtual memory calls and exported as POSIX descriptors; CUDA knows no
// seal, so an importer's read-only mapping is a promise (Info.ReadOnlyPools is false) and whoever takes bytes out of a
// pool checks their sum. Fences are events that return to a pool by themselves once they have passed; timeline slots are
// 8 bytes of a Shared memory, written and awaited in stream order by the device.
//
// A device without those calls exports pools by the driver's older 64-byte handles (ipc.go).
//
// Batches of equal small pages are moved by one kernel, other batches by one call of the driver where it has it (12.8),
// else copy by copy. The kernels come as PTX (package kernels), which the driver translates when they are first needed.
//
// A stream holds at most 512 entries that are not known to be done: callers wait here, without a lock, and never inside
// the driver, whose own queue would block the whole device behind one stream that waits for a dead engine.
//
// A binary that imports this package needs the system's dynamic loader. With the build tag nocuda, and where the package
// has not been ported, Open answers gpu.ErrNoDevice and the binary is static.
package cuda
