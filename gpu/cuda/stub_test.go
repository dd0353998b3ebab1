//go:build linux && amd64 && !nocuda

package cuda

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/kvtier/kvtier/gpu"
)

// stub is the driver without a GPU, built by TestMain from testdata/stub. Its state is that of the process, so tests that
// use it do not run in parallel.
var stub struct {
	path             string
	set, fail, count uintptr
	reset, failure   uintptr
}

func TestMain(m *testing.M) {
	flag.Parse()
	code, err := withStub(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func withStub(m *testing.M) (int, error) {
	if stub.path = os.Getenv(childLibrary); stub.path == "" { // a child that is killed leaves nothing behind
		dir, err := os.MkdirTemp("", "kvtier-stub")
		if err != nil {
			return 1, err
		}
		defer os.RemoveAll(dir)
		stub.path = filepath.Join(dir, "libcuda.so.1")
		if err := buildStub(stub.path, "kernels"); err != nil {
			return 1, err
		}
	}
	h, err := purego.Dlopen(stub.path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		return 1, err
	}
	for name, fn := range map[string]*uintptr{"stub_set": &stub.set, "stub_fail": &stub.fail, "stub_count": &stub.count, "stub_reset": &stub.reset, "stub_failure": &stub.failure} {
		if *fn, err = purego.Dlsym(h, name); err != nil {
			return 1, err
		}
	}
	return m.Run(), nil
}

// childLibrary tells a test process that another started where the stub is.
const childLibrary = "KVTIER_TEST_STUB"

// buildStub builds the stub to path with the kernels of a directory.
func buildStub(path, kernels string) error {
	cmd := exec.Command("testdata/stub/build.sh", path, kernels)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build the stub driver (needs g++): %w\n%s", err, out)
	}
	return nil
}

func stubSet(key string, value int) {
	k := cString(key)
	invoke(stub.set, uintptr(unsafe.Pointer(&k[0])), uintptr(value))
}

// stubFail makes the nth call from now on of a driver function return code.
func stubFail(call string, nth, code int) {
	k := cString(call)
	invoke(stub.fail, uintptr(unsafe.Pointer(&k[0])), uintptr(nth), uintptr(code))
}

func stubCount(what string) int {
	k := cString(what)
	r, _, _ := purego.SyscallN(stub.count, uintptr(unsafe.Pointer(&k[0])))
	return int(r)
}

func stubReset() { invoke(stub.reset) }

// openStub opens the stub's device; the test fails if the driver holds anything at its end.
func openStub(t *testing.T) *Device {
	t.Helper()
	stubReset()
	t.Cleanup(func() { checkLeaks(t) })
	d, err := Open(Config{Library: stub.path})
	if err != nil {
		t.Fatal(err)
	}
	return d.(*Device)
}

func checkLeaks(t *testing.T) {
	t.Helper()
	for _, what := range []string{"ranges", "reserved", "handles", "streams", "events", "modules", "contexts", "used"} {
		if n := stubCount(what); n != 0 {
			t.Errorf("the driver still holds %d %s", n, what)
		}
	}
}

func asDevice(t *testing.T) gpu.Device { return openStub(t) }
