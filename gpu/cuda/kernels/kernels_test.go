package kernels

import (
	"bytes"
	"compress/gzip"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestModulesAreComplete(t *testing.T) {
	for _, m := range Modules {
		text, err := PTX(m)
		if err != nil {
			t.Fatal(err)
		}
		if text[len(text)-1] != 0 || !bytes.Contains(text, []byte(".version 7.8")) || !bytes.Contains(text, []byte(".target sm_80")) {
			t.Errorf("%s is not PTX 7.8 for sm_80 with a zero at its end", m)
		}
	}
	if _, err := PTX("nothing"); err == nil {
		t.Error("PTX of an unknown module")
	}
}

// Rows are read 16 bytes at a time, and nothing lives on a stack: both can be lost without any test failing.
func TestPTXLoadsWhole(t *testing.T) {
	for _, m := range Modules {
		text, err := PTX(m)
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(text, []byte(".local ")) {
			t.Errorf("%s: a stack frame", m)
		}
		for _, entry := range bytes.Split(text, []byte(".entry "))[1:] {
			name, _, _ := bytes.Cut(entry, []byte("("))
			if !bytes.HasPrefix(name, []byte("kv_sum")) && string(name) != "kv_decode_combine" && !bytes.Contains(entry, []byte("ld.global.nc.v4")) {
				t.Errorf("%s: no 16-byte load", name)
			}
		}
	}
}

// The checked-in PTX is what the sources give with the compiler it was made with.
func TestPTXIsCurrent(t *testing.T) {
	clang, err := exec.LookPath("clang-19")
	if err != nil {
		t.Skip("no clang-19 (Debian: apt-get install clang-19)")
	}
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), "./build.sh", dir)
	cmd.Env = append(os.Environ(), "CLANG="+clang)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, m := range Modules {
		want, err := PTX(m)
		if err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(filepath.Join(dir, m+".ptx.gz"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		r, err := gzip.NewReader(f)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want[:len(want)-1]) {
			t.Errorf("%s: run build.sh and check in what it writes", m)
		}
	}
}

// ptxas translates the PTX for real machines, of the oldest kind that the kernels are for and of the one that is there
// most: a kernel with a stack frame or a spill is an error. `make ptx-check` brings a ptxas.
func TestPTXAssembles(t *testing.T) {
	ptxas, err := exec.LookPath("ptxas")
	if err != nil {
		t.Skip("no ptxas (make ptx-check brings one)")
	}
	for _, m := range Modules {
		text, err := PTX(m)
		if err != nil {
			t.Fatal(err)
		}
		in := filepath.Join(t.TempDir(), m+".ptx")
		if err := os.WriteFile(in, text[:len(text)-1], 0o600); err != nil {
			t.Fatal(err)
		}
		for _, arch := range []string{"sm_80", "sm_90"} {
			out, err := exec.CommandContext(t.Context(), ptxas, "-arch="+arch, "-v", in, "-o", in+"."+arch).CombinedOutput()
			if err != nil {
				t.Errorf("%s %s: %v\n%s", m, arch, err, out)
				continue
			}
			clean := strings.Count(string(out), "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads")
			if entries := bytes.Count(text, []byte(".entry ")); clean != entries {
				t.Errorf("%s %s: %d of %d kernels use no stack\n%s", m, arch, clean, entries, out)
			}
		}
	}
}
