package gpu

import (
	"errors"
	"fmt"
)

// What a driver may answer, for errors.Is. A call that fails has changed nothing unless its comment says otherwise.
var (
	ErrNoDevice    = errors.New("gpu: no such device")                // no driver library, no device, or no device of that number
	ErrDriver      = errors.New("gpu: driver not usable")             // too old, an entry point missing, a kernel refused
	ErrUnsupported = errors.New("gpu: not supported by this device")  // this device or kernel cannot do it
	ErrNoMemory    = errors.New("gpu: out of memory")                 // free some, or ask for less
	ErrArgument    = errors.New("gpu: bad argument")                  // always an *ArgError
	ErrFault       = errors.New("gpu: address outside living memory") // always a *FaultError
	ErrBusy        = errors.New("gpu: queued work still uses it")     // wait for a fence behind that work, then try again
	ErrLost        = errors.New("gpu: device lost")                   // sticky: close the device and open it anew
	ErrClosed      = errors.New("gpu: closed")                        // the stream, memory or device was closed or freed
	ErrLeak        = errors.New("gpu: not freed before close")        // from Device.Close; what leaked was released
)

// What is wrong with an argument of a kernel, for errors.Is; each is also ErrArgument.
var (
	ErrShape  = errors.New("gpu: unsupported shape")
	ErrStride = errors.New("gpu: rows or pages overlap")
	ErrAlign  = errors.New("gpu: misaligned")
	ErrTable  = errors.New("gpu: block table out of range")
	ErrSeqLen = errors.New("gpu: sequence length out of range")
)

// ArgError names the argument that a call refused. It matches ErrArgument and, where Err is set, that class too.
type ArgError struct {
	Op   string // the call or kernel, such as "attention"
	Arg  string // the argument, such as "Table[3]"
	Got  int64  // its value
	Want string // what would have been accepted
	Err  error  // ErrShape, ErrStride, ErrAlign, ErrTable, ErrSeqLen or nil
}

func (e *ArgError) Error() string {
	return fmt.Sprintf("gpu: %s: %s is %d, want %s", e.Op, e.Arg, e.Got, e.Want)
}

// Unwrap lets errors.Is match ErrArgument and the class.
func (e *ArgError) Unwrap() []error {
	if e.Err == nil {
		return []error{ErrArgument}
	}
	return []error{ErrArgument, e.Err}
}

// FaultError names an address range that does not lie in living memory of the device: freed, never allocated, or
// running past an end; or that it may not be written.
type FaultError struct {
	Op    string
	Addr  Addr
	Bytes int64
}

func (e *FaultError) Error() string {
	return fmt.Sprintf("gpu: %s: %d bytes at %#x are not in living memory, or may not be written", e.Op, e.Bytes, uint64(e.Addr))
}

// Unwrap lets errors.Is match ErrFault.
func (e *FaultError) Unwrap() error { return ErrFault }
