//go:build linux && (amd64 || arm64) && !nocuda

package cuda

import (
	"fmt"
	"strings"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/kvtier/kvtier/gpu"
)

// entry is an entry point of the driver.
type entry int

const (
	deviceGet entry = iota
	deviceGetCount
	deviceGetName
	deviceGetAttribute
	deviceGetUUID
	deviceTotalMem
	deviceCanAccessPeer
	primaryCtxRetain
	primaryCtxRelease
	ctxSetCurrent
	getErrorName
	memAlloc
	memFree
	memHostRegister
	memHostUnregister
	memHostGetDevicePointer
	memGetGranularity
	memCreate
	memRelease
	memAddressReserve
	memAddressFree
	memMap
	memUnmap
	memSetAccess
	memExport
	memImport
	ipcGetMemHandle
	ipcOpenMemHandle
	ipcCloseMemHandle
	streamCreate
	streamDestroy
	streamQuery
	streamWaitEvent
	streamWriteValue
	streamWaitValue
	eventCreate
	eventDestroy
	eventRecord
	eventQuery
	memcpyAsync
	memcpyBatchAsync
	memsetAsync
	moduleLoad
	moduleUnload
	moduleGetFunction
	launchKernel
	entryCount
)

// entries are the names and, for each, the version whose calling convention is used here.
var entries = [entryCount]struct {
	name     string
	version  int
	optional bool
}{
	deviceGet:               {"cuDeviceGet", 2000, false},
	deviceGetCount:          {"cuDeviceGetCount", 2000, false},
	deviceGetName:           {"cuDeviceGetName", 2000, false},
	deviceGetAttribute:      {"cuDeviceGetAttribute", 2000, false},
	deviceGetUUID:           {"cuDeviceGetUuid", 11040, false}, // the form that names a MIG slice
	deviceTotalMem:          {"cuDeviceTotalMem", 3020, false},
	deviceCanAccessPeer:     {"cuDeviceCanAccessPeer", 4000, false},
	primaryCtxRetain:        {"cuDevicePrimaryCtxRetain", 7000, false},
	primaryCtxRelease:       {"cuDevicePrimaryCtxRelease", 11000, false},
	ctxSetCurrent:           {"cuCtxSetCurrent", 4000, false},
	getErrorName:            {"cuGetErrorName", 6000, false},
	memAlloc:                {"cuMemAlloc", 3020, false},
	memFree:                 {"cuMemFree", 3020, false},
	memHostRegister:         {"cuMemHostRegister", 6050, false},
	memHostUnregister:       {"cuMemHostUnregister", 4000, false},
	memHostGetDevicePointer: {"cuMemHostGetDevicePointer", 3020, false},
	memGetGranularity:       {"cuMemGetAllocationGranularity", 10020, false},
	memCreate:               {"cuMemCreate", 10020, false},
	memRelease:              {"cuMemRelease", 10020, false},
	memAddressReserve:       {"cuMemAddressReserve", 10020, false},
	memAddressFree:          {"cuMemAddressFree", 10020, false},
	memMap:                  {"cuMemMap", 10020, false},
	memUnmap:                {"cuMemUnmap", 10020, false},
	memSetAccess:            {"cuMemSetAccess", 10020, false},
	memExport:               {"cuMemExportToShareableHandle", 10020, false},
	memImport:               {"cuMemImportFromShareableHandle", 10020, false},
	ipcGetMemHandle:         {"cuIpcGetMemHandle", 4010, false},
	ipcOpenMemHandle:        {"cuIpcOpenMemHandle", 11000, false},
	ipcCloseMemHandle:       {"cuIpcCloseMemHandle", 4010, false},
	streamCreate:            {"cuStreamCreate", 2000, false},
	streamDestroy:           {"cuStreamDestroy", 4000, false},
	streamQuery:             {"cuStreamQuery", 2000, false},
	streamWaitEvent:         {"cuStreamWaitEvent", 3020, false},
	streamWriteValue:        {"cuStreamWriteValue64", 11070, false},
	streamWaitValue:         {"cuStreamWaitValue64", 11070, false},
	eventCreate:             {"cuEventCreate", 2000, false},
	eventDestroy:            {"cuEventDestroy", 4000, false},
	eventRecord:             {"cuEventRecord", 2000, false},
	eventQuery:              {"cuEventQuery", 2000, false},
	memcpyAsync:             {"cuMemcpyAsync", 4000, false},
	memcpyBatchAsync:        {"cuMemcpyBatchAsync", 12080, true}, // 13.0 has another form with one argument less
	memsetAsync:             {"cuMemsetD8Async", 3020, false},
	moduleLoad:              {"cuModuleLoadDataEx", 2010, false},
	moduleUnload:            {"cuModuleUnload", 2000, false},
	moduleGetFunction:       {"cuModuleGetFunction", 2000, false},
	launchKernel:            {"cuLaunchKernel", 4000, false},
}

// Constants of the driver API.
const (
	attrUnits, attrMajor, attrMinor, attrVMM, attrPosixFD = 16, 75, 76, 102, 103
	locationDevice, allocationPinned, handlePosixFD       = 1, 1, 1
	accessRead, accessReadWrite                           = 1, 3
	streamNonBlocking, eventDisableTiming                 = 1, 2
	registerPortable, registerDeviceMap                   = 1, 2
	waitGreaterOrEqual                                    = 0

	codeNotReady = 600
)

// library is the driver, opened.
type library struct {
	fn      [entryCount]uintptr
	version int
	missing []string
}

// load opens the driver library, initialises it and finds its entry points.
func load(path string) (*library, error) {
	if path == "" {
		path = "libcuda.so.1"
	}
	handle, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", gpu.ErrNoDevice, err)
	}
	var first [3]uintptr
	for i, name := range []string{"cuInit", "cuDriverGetVersion", "cuGetProcAddress_v2"} {
		if first[i], err = purego.Dlsym(handle, name); err != nil {
			return nil, fmt.Errorf("%w: %s: %w", gpu.ErrDriver, path, err)
		}
	}
	l := &library{}
	var version int32
	if code := invoke(first[1], uintptr(unsafe.Pointer(&version))); code != 0 {
		return nil, &Error{Call: "cuDriverGetVersion", Code: code}
	}
	l.version = int(version)
	if code := invoke(first[0], 0); code != 0 {
		return l, &Error{Call: "cuInit", Code: code}
	}
	for i, e := range entries {
		var status int32
		name := cString(e.name)
		code := invoke(first[2], uintptr(unsafe.Pointer(&name[0])), uintptr(unsafe.Pointer(&l.fn[i])), uintptr(e.version), 0, uintptr(unsafe.Pointer(&status)))
		if code != 0 || status != 0 || l.fn[i] == 0 {
			l.fn[i] = 0
			if !e.optional {
				l.missing = append(l.missing, fmt.Sprintf("%s@%d", e.name, e.version))
			}
		}
	}
	if len(l.missing) > 0 {
		return l, fmt.Errorf("%w: version %d lacks %s", gpu.ErrDriver, l.version, strings.Join(l.missing, ", "))
	}
	return l, nil
}

// invoke calls an entry point. Only the low 32 bits of what comes back are the result.
//
//go:uintptrescapes
func invoke(fn uintptr, args ...uintptr) int {
	r, _, _ := purego.SyscallN(fn, args...)
	return int(int32(r))
}

// call calls an entry point. Pointers are converted in the argument list, so that they stay alive and in place.
//
//go:uintptrescapes
func (l *library) call(e entry, args ...uintptr) error {
	r, _, _ := purego.SyscallN(l.fn[e], args...)
	if code := int(int32(r)); code != 0 {
		return l.fail(e, code)
	}
	return nil
}

func (l *library) fail(e entry, code int) error {
	var name *byte
	text := ""
	if invoke(l.fn[getErrorName], uintptr(code), uintptr(unsafe.Pointer(&name))) == 0 && name != nil {
		text = goString(name)
	}
	return &Error{Call: entries[e].name, Code: code, Name: text}
}

// Error is a result of the driver. It matches the sentinel of package gpu that fits its code.
type Error struct {
	Call string
	Code int
	Name string // as the driver names the code
}

func (e *Error) Error() string {
	if e.Name == "" {
		return fmt.Sprintf("gpu/cuda: %s: error %d", e.Call, e.Code)
	}
	return fmt.Sprintf("gpu/cuda: %s: %s (%d)", e.Call, e.Name, e.Code)
}

// Unwrap is the class of the error.
func (e *Error) Unwrap() error {
	switch e.Code {
	case 2:
		return gpu.ErrNoMemory
	case 100, 101:
		return gpu.ErrNoDevice
	case 3, 34, 35, 36, 200, 209, 218, 222, 500, 803, 804:
		return gpu.ErrDriver
	case 801:
		return gpu.ErrUnsupported
	case codeNotReady:
		return gpu.ErrBusy
	case 46, 214, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 999:
		return gpu.ErrLost
	}
	return gpu.ErrArgument
}

func cString(s string) []byte { return append([]byte(s), 0) }

func goString(p *byte) string {
	n := 0
	for *(*byte)(unsafe.Add(unsafe.Pointer(p), n)) != 0 {
		n++
	}
	return string(unsafe.Slice(p, n))
}
