package gpu

import "unsafe"

// AddrIn is the address at which the device sees b, if b lies inside memory that the CPU reaches too: registered memory,
// or that of the host device.
func AddrIn(m Mem, b []byte) (Addr, bool) {
	whole := m.Bytes()
	if len(whole) == 0 || len(b) == 0 {
		return 0, false
	}
	first, at := uintptr(unsafe.Pointer(unsafe.SliceData(whole))), uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	if at < first || at-first > uintptr(len(whole)-len(b)) || len(b) > len(whole) {
		return 0, false
	}
	return m.Addr() + Addr(at-first), true
}
