package bench

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"
)

// programs are the kvtier binaries built for this run of the tests, by tags.
var programs struct {
	sync.Mutex
	dir   string
	built map[string]func() (string, error)
}

func TestMain(m *testing.M) {
	code := m.Run()
	if programs.dir != "" {
		os.RemoveAll(programs.dir)
	}
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, "goroutines left:", err)
			code = 1
		}
	}
	os.Exit(code)
}

// program builds kvtier with the given tags, once, with the race detector if
// this test has it.
func program(t *testing.T, tags ...string) string {
	t.Helper()
	programs.Lock()
	if programs.dir == "" {
		dir, err := os.MkdirTemp("", "kvtier-test-")
		if err != nil {
			t.Fatal(err)
		}
		programs.dir, programs.built = dir, map[string]func() (string, error){}
	}
	key := strings.Join(tags, ",")
	build, ok := programs.built[key]
	if !ok {
		out := filepath.Join(programs.dir, "kvtier-"+key)
		build = sync.OnceValues(func() (string, error) { return out, buildProgram(out, key) })
		programs.built[key] = build
	}
	programs.Unlock()
	path, err := build()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func buildProgram(out, tags string) error {
	args := []string{"build", "-o", out, "-tags", tags}
	if raceEnabled {
		args = append(args, "-race")
	}
	text, err := exec.Command("go", append(args, "github.com/kvtier/kvtier/cmd/kvtier")...).CombinedOutput()
	if err != nil {
		return errors.Join(err, errors.New(string(text)))
	}
	return nil
}
