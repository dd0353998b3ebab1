//go:build linux && amd64 && !nocuda

package main

import (
	"encoding/json"
	"errors"
	"os/exec"
	"path/filepath"
	"testing"
)

// The folder that "make gpu-check" prepares runs by itself, here on the driver
// without a GPU; a machine without a driver is told so.
func TestFolder(t *testing.T) {
	if testing.Short() {
		t.Skip("builds the folder, which takes 15 s")
	}
	dir := t.TempDir()
	if out, err := exec.CommandContext(t.Context(), "make", "-C", "../../..", "gpu-check", "GPU_CHECK="+dir).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for library, want := range map[string]bool{filepath.Join(dir, "libcuda-stub.so"): true, filepath.Join(dir, "nothing.so"): false} {
		var r result
		out, err := exec.CommandContext(t.Context(), filepath.Join(dir, "run.sh"), "-library", library, "-scale", "64").Output()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		if err := json.Unmarshal(out, &r); err != nil {
			t.Fatalf("no report: %v\n%s", err, out)
		}
		if ok := err == nil && len(r.Errors) == 0; ok != want {
			t.Errorf("%s: %v, errors %v", filepath.Base(library), err, r.Errors)
		}
		if want && (r.ForeignReader != "ok" || r.Conformance != "ok" || len(r.Attention) != 3 || len(r.Copies.Copies) == 0) {
			t.Errorf("%+v", r)
		}
	}
}
