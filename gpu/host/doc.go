// Package host is the device that is always there: memory of this machine that behaves like device memory, and the CPU
// kernels. A pool is a memfd sealed against everybody else's writes, and goes to other processes as a descriptor, as a
// pool of the CUDA driver does. Streams are asynchronous: work runs later, on a goroutine of the stream, and two streams
// have no order but what fences and slots give them.
//
// With Config.Strict a device is as hostile as the rules allow, for tests: a stream runs nothing until something observes
// it, so that a forgotten wait reads old bytes every time and not once in a thousand, and new memory holds a pattern.
//
// Await polls its slot, at first every few microseconds and at last every millisecond: another process may raise it, and
// nothing would tell this one.
package host
