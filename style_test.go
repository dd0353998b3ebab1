// Package kvtier_test holds the rules of this repository that a machine can
// check: which package may import which, one door per library, package
// comments, names, waiting in tests.
package kvtier_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"testing"
)

const module = "github.com/kvtier/kvtier/"

// importMap lists, for each package, the packages of this module that it may
// import. A row is read from the bottom of the system up; a new edge needs a
// decision record. Tests may open other doors.
var importMap = map[string][]string{
	"proto/kvtier/v1":            {},
	"proto/kvstatus":             {"proto/kvtier/v1", "paging"},
	"paging":                     {"paging/check"},
	"paging/check":               {},
	"paging/check/sabotage":      {},
	"paging/shm":                 {"paging", "paging/check"},
	"gpu":                        {},
	"gpu/gputest":                {"gpu"},
	"gpu/host":                   {"gpu", "gpu/host/attn", "paging/shm"},
	"gpu/host/attn":              {"gpu"},
	"gpu/cuda":                   {"gpu", "gpu/cuda/kernels"},
	"gpu/cuda/kernels":           {},
	"tier/policy":                {},
	"tier":                       {"paging", "paging/check", "paging/check/sabotage", "tier/policy"},
	"tier/arena":                 {"tier", "paging", "paging/check", "paging/check/sabotage", "paging/shm"},
	"tier/ram":                   {"tier", "tier/arena", "paging", "paging/check", "paging/check/sabotage", "paging/shm"},
	"tier/nvme":                  {"tier", "paging", "paging/check", "paging/check/sabotage"},
	"tier/hbm":                   {"tier", "tier/arena", "paging", "paging/check", "paging/check/sabotage", "paging/shm", "gpu"},
	"tier/tiertest":              {"tier", "paging"},
	"client":                     {"proto/kvtier/v1", "proto/kvstatus", "paging", "paging/shm"},
	"server/placement":           {"paging"},
	"server/member":              {"paging", "server/placement"},
	"server/directory":           {"proto/kvtier/v1", "paging", "paging/check/sabotage", "server/placement"},
	"server/transport":           {"paging", "paging/check/sabotage", "server/placement"},
	"server/cluster":             {"proto/kvtier/v1", "paging", "tier", "server/placement", "server/directory", "server/transport"},
	"server/cluster/clustertest": {"server/placement", "server/transport"},
	"server/migrate":             {"paging", "server/placement"},
	"server/sessions":            {"server/cluster", "proto/kvtier/v1", "proto/kvstatus", "paging", "paging/check/sabotage", "tier", "server/placement", "server/directory", "server/migrate"},
	"server/plans":               {"server/cluster", "proto/kvtier/v1", "paging", "paging/check/sabotage", "tier", "server/placement", "server/directory"},
	"server/trust":               {"paging", "server/transport"},
	"server/rpc":                 {"proto/kvtier/v1", "proto/kvstatus", "paging", "paging/shm"},
	"server":                     {"server/cluster", "server/sessions", "server/plans", "server/rpc", "server/placement", "server/member", "server/directory", "server/transport", "server/trust", "server/migrate", "tier", "client", "paging", "paging/check", "paging/shm", "proto/kvtier/v1", "proto/kvstatus"},
	"server/servertest":          {"server", "tier", "tier/ram", "tier/hbm", "tier/nvme", "gpu", "gpu/host", "paging"},
	"bench":                      nil, // the client, paging and the package being measured
	"cmd/kvtier":                 nil, // picks drivers and devices: anything
	"gpu/cuda/check":             nil,
	"gpu/cuda/testdata/stub":     nil,
}

// doors lists the only packages that may import an outside library; one that is
// not listed may be imported by none. Why a library has more than one door is in
// docs/adr/0008. Tests may open other doors.
var doors = map[string][]string{
	"github.com/cockroachdb/pebble":           {"tier/nvme", "server/sessions"},
	"github.com/hashicorp/raft":               {"server/directory"},
	"github.com/hashicorp/raft-wal":           {"server/directory"},
	"github.com/hashicorp/go-hclog":           {"server/directory", "server/member"},
	"github.com/hashicorp/memberlist":         {"server/member"},
	"github.com/dgraph-io/ristretto":          {"server/cluster"},
	"github.com/prometheus/client_golang":     {"server"},
	"go.opentelemetry.io":                     {"server"},
	"github.com/ebitengine/purego":            {"gpu/cuda"},
	"github.com/spf13/cobra":                  {"cmd/kvtier"},
	"github.com/spf13/pflag":                  {"cmd/kvtier"},
	"go.yaml.in/yaml":                         {"cmd/kvtier"},
	"github.com/zeebo/blake3":                 {"paging"},
	"github.com/zeebo/xxh3":                   {"paging", "gpu/cuda", "bench"},
	"google.golang.org/grpc":                  {"proto/kvtier/v1", "proto/kvstatus", "client", "server", "server/rpc"},
	"google.golang.org/protobuf":              {"proto/kvtier/v1", "proto/kvstatus", "client", "server", "server/rpc", "server/directory", "server/cluster", "server/sessions", "server/plans", "cmd/kvtier", "bench"},
	"golang.org/x/sys/unix":                   {"paging/shm", "tier/nvme", "bench", "cmd/kvtier", "server/transport", "gpu/host"},
	"golang.org/x/sys/cpu":                    {"gpu/host/attn"},
	"github.com/HdrHistogram/hdrhistogram-go": {"bench"},
	"github.com/vbauerster/mpb":               {"cmd/kvtier"},
}

// refused names packages that may not appear in the module at all.
var refused = map[string]string{
	"encoding/gob":  "no serialisation that can name types: pages and records have fixed formats",
	"math/rand":     "use math/rand/v2; randomness of pure code is an argument",
	"plugin":        "nothing executable is loaded",
	"io/ioutil":     "deprecated",
	"unsafe":        "only gpu/ and paging/shm touch raw memory",
	"runtime/cgo":   "the build needs no C compiler",
	"net/http/cgi":  "no",
	"text/template": "formats are fixed",
}

var unsafeDoors = []string{"gpu", "gpu/host", "gpu/host/attn", "gpu/cuda", "paging/shm"}

var junkNames = []string{"common", "types", "models", "utils", "util", "helpers", "misc", "shared", "base"}

type goFile struct {
	path string // relative to the root
	pkg  string // directory
	test bool
	file *ast.File
}

func parseAll(t *testing.T) (*token.FileSet, []goFile) {
	t.Helper()
	fset := token.NewFileSet()
	var files []goFile
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if name := d.Name(); path != "." && (strings.HasPrefix(name, ".") || name == "testdata" || name == "gen" || name == "bin" || name == "node_modules") {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, ".pb.go") {
			return nil
		}
		f, err := parser.ParseFile(fset, path, nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		files = append(files, goFile{path: path, pkg: filepath.ToSlash(filepath.Dir(path)), test: strings.HasSuffix(path, "_test.go"), file: f})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return fset, files
}

func TestImportMap(t *testing.T) {
	_, files := parseAll(t)
	for _, f := range files {
		if f.test || f.pkg == "." {
			continue
		}
		allowed, known := importMap[f.pkg]
		if !known {
			t.Errorf("%s: package %s is not on the import map: add a row to style_test.go and say why in docs/adr", f.path, f.pkg)
			continue
		}
		for _, imp := range f.file.Imports {
			checkImport(t, f, strings.Trim(imp.Path.Value, `"`), allowed)
		}
	}
}

func checkImport(t *testing.T, f goFile, path string, allowed []string) {
	t.Helper()
	if reason, bad := refused[path]; bad && (path != "unsafe" || !slices.Contains(unsafeDoors, f.pkg)) {
		t.Errorf("%s imports %s: %s", f.path, path, reason)
	}
	if rel, ours := strings.CutPrefix(path, module); ours {
		if allowed != nil && !slices.Contains(allowed, rel) {
			t.Errorf("%s imports %s, which is not on its row of the import map (%s)", f.path, rel, strings.Join(allowed, " "))
		}
		return
	}
	if first, _, _ := strings.Cut(path, "/"); !strings.Contains(first, ".") {
		return // of the standard library
	}
	listed := false
	for lib, pkgs := range doors {
		if path != lib && !strings.HasPrefix(path, lib+"/") {
			continue
		}
		listed = true
		if !slices.Contains(pkgs, f.pkg) {
			t.Errorf("%s imports %s: its only doors are %s", f.path, path, strings.Join(pkgs, ", "))
		}
	}
	if !listed {
		t.Errorf("%s imports %s, which is no library of this module: take the standard library, or add a door to style_test.go and say why in docs/adr", f.path, path)
	}
}

func TestOnePackageComment(t *testing.T) {
	_, files := parseAll(t)
	comments := map[string][]string{}
	for _, f := range files {
		if f.test {
			continue
		}
		if _, seen := comments[f.pkg]; !seen {
			comments[f.pkg] = nil
		}
		if f.file.Doc != nil {
			comments[f.pkg] = append(comments[f.pkg], f.path)
		}
	}
	var pkgs []string
	for pkg := range comments {
		pkgs = append(pkgs, pkg)
	}
	sort.Strings(pkgs)
	for _, pkg := range pkgs {
		if n := len(comments[pkg]); n != 1 && pkg != "." {
			t.Errorf("package %s has %d package comments, want exactly 1 %v", pkg, n, comments[pkg])
		}
		if slices.Contains(junkNames, filepath.Base(pkg)) {
			t.Errorf("package %s: name the noun it holds", pkg)
		}
	}
}

func TestNoSleepInTests(t *testing.T) {
	fset, files := parseAll(t)
	for _, f := range files {
		if !f.test {
			continue
		}
		bubble := false
		for _, imp := range f.file.Imports {
			bubble = bubble || imp.Path.Value == `"testing/synctest"`
		}
		ast.Inspect(f.file, func(n ast.Node) bool {
			if name := selector(n); name == "time.Sleep" && !bubble {
				t.Errorf("%s: wait for a condition or use testing/synctest, not time.Sleep", fset.Position(n.Pos()))
			}
			return true
		})
	}
}

// pure packages decide; they have no clock, goroutine or lock.
var purePackages = []string{"paging", "tier/policy", "server/placement"}

func TestPurePackages(t *testing.T) {
	fset, files := parseAll(t)
	for _, f := range files {
		if f.test || !slices.Contains(purePackages, f.pkg) {
			continue
		}
		ast.Inspect(f.file, func(n ast.Node) bool {
			switch name := selector(n); name {
			case "time.Now", "time.Since", "time.After", "time.NewTimer", "sync.Mutex", "sync.RWMutex", "os.Open", "slog.Default":
				t.Errorf("%s: %s in a pure package: pass it in", fset.Position(n.Pos()), name)
			}
			if _, ok := n.(*ast.GoStmt); ok {
				t.Errorf("%s: goroutine in a pure package", fset.Position(n.Pos()))
			}
			return true
		})
	}
}

func TestFileLength(t *testing.T) {
	const limit = 600
	fset, files := parseAll(t)
	for _, f := range files {
		if lines := fset.Position(f.file.End()).Line; lines > limit && f.pkg != "." && !strings.HasSuffix(f.path, "_amd64.go") {
			t.Errorf("%s has %d lines, more than %d: split it by noun", f.path, lines, limit)
		}
	}
}

// TestOnePebbleGet keeps the store, whose bytes die at the next step of an
// iterator or at the closer's Close, inside the one file that wraps it.
func TestOnePebbleGet(t *testing.T) {
	const wrapper = "tier/nvme/manifest.go"
	fset, files := parseAll(t)
	for _, f := range files {
		if f.test || f.pkg != "tier/nvme" || filepath.ToSlash(f.path) == wrapper {
			continue
		}
		for _, imp := range f.file.Imports {
			if strings.Trim(imp.Path.Value, `"`) == "github.com/cockroachdb/pebble/v2" {
				t.Errorf("%s imports pebble: keep it behind %s", f.path, wrapper)
			}
		}
		ast.Inspect(f.file, func(n ast.Node) bool {
			if sel, ok := n.(*ast.SelectorExpr); ok && (sel.Sel.Name == "Get" || sel.Sel.Name == "NewIter") {
				t.Errorf("%s: %s outside %s", fset.Position(n.Pos()), sel.Sel.Name, wrapper)
			}
			return true
		})
	}
}

func selector(n ast.Node) string {
	sel, ok := n.(*ast.SelectorExpr)
	if !ok {
		return ""
	}
	if x, ok := sel.X.(*ast.Ident); ok {
		return fmt.Sprintf("%s.%s", x.Name, sel.Sel.Name)
	}
	return ""
}
