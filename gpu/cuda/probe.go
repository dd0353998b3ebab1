//go:build linux && (amd64 || arm64) && !nocuda

package cuda

import (
	"bytes"
	"errors"
	"fmt"
	"unsafe"
)

// Probe looks at the driver library and its devices without opening any. An error is that of Open; what was found before
// it is in the Report.
func Probe(path string) (Report, error) {
	l, err := load(path)
	if l == nil {
		return Report{}, err
	}
	r := Report{DriverVersion: l.version, Missing: l.missing, BatchCopies: l.fn[memcpyBatchAsync] != 0}
	if err != nil {
		return r, err
	}
	var n int32
	if err := l.call(deviceGetCount, uintptr(unsafe.Pointer(&n))); err != nil {
		return r, fmt.Errorf("gpu/cuda: count devices: %w", err)
	}
	for i := range int(n) {
		d, _, err := l.describe(i)
		if err != nil {
			return r, err
		}
		for peer := range int(n) {
			var can int32
			err := l.call(deviceCanAccessPeer, uintptr(unsafe.Pointer(&can)), uintptr(i), uintptr(peer))
			d.Peers = append(d.Peers, err == nil && can != 0)
		}
		r.Devices = append(r.Devices, d)
	}
	return r, nil
}

// describe asks for what a device is, and its handle.
func (l *library) describe(ordinal int) (d DeviceReport, device int32, err error) {
	d.Ordinal = ordinal
	if err := l.call(deviceGet, uintptr(unsafe.Pointer(&device)), uintptr(ordinal)); err != nil {
		return d, 0, fmt.Errorf("gpu/cuda: device %d: %w", ordinal, err)
	}
	attr := func(which uintptr) int {
		var v int32
		err = errors.Join(err, l.call(deviceGetAttribute, uintptr(unsafe.Pointer(&v)), which, uintptr(device)))
		return int(v)
	}
	var name [128]byte
	var total uint64
	err = errors.Join(l.call(deviceGetName, uintptr(unsafe.Pointer(&name)), uintptr(len(name)), uintptr(device)),
		l.call(deviceTotalMem, uintptr(unsafe.Pointer(&total)), uintptr(device)),
		l.call(deviceGetUUID, uintptr(unsafe.Pointer(&d.UUID)), uintptr(device)))
	text, _, _ := bytes.Cut(name[:], []byte{0})
	d.Name, d.TotalBytes = string(text), int64(total)
	d.Units, d.VMM, d.PosixFD = attr(attrUnits), attr(attrVMM) != 0, attr(attrPosixFD) != 0
	d.Compute = fmt.Sprintf("%d.%d", attr(attrMajor), attr(attrMinor))
	if err != nil {
		return d, 0, fmt.Errorf("gpu/cuda: device %d: %w", ordinal, err)
	}
	return d, device, nil
}
