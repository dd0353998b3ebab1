//go:build sabotage

package bench

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// smallArgs is the demo with pages of 4 KiB and tiers in proportion.
const smallArgs = "bench replay -o json --block-bytes 4KiB --ram 4MiB --nvme 64MiB"

// runSabotaged runs a command line of the program that was built with the
// sabotage tag, with some switches on, and returns its exit code and its report.
func runSabotaged(t *testing.T, switches, args string) (int, *ReplayReport) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program(t, "sabotage"), append(strings.Fields(args), "--temp-dir", t.TempDir())...)
	cmd.Env = append(os.Environ(), "KVTIER_SABOTAGE="+switches)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	var r ReplayReport
	if err := json.Unmarshal(stdout.Bytes(), &r); err != nil {
		t.Fatalf("no report: %v\n%s%s", err, stdout.String(), stderr.String())
	}
	return cmd.ProcessState.ExitCode(), &r
}

// TestSabotageIsFound shows that the zeros of a report can be other than zero.
func TestSabotageIsFound(t *testing.T) {
	for _, c := range []struct {
		name, switches, args string
		count                func(r *ReplayReport) int64
	}{
		{"skip-verify", "skip-verify", smallArgs + " --kill-at 0.5 --durable-every 1 --damage 400", func(r *ReplayReport) int64 { return r.WrongPages }},
		{"neighbour-page", "neighbour-page", smallArgs, func(r *ReplayReport) int64 { return r.WrongPages }},
		{"neighbour-page in the demo", "neighbour-page", "demo -o json", func(r *ReplayReport) int64 { return r.WrongPages }},
		{"reuse-leased-slot", "reuse-leased-slot", "bench replay -o json --block-bytes 4KiB --ram 2MiB --nvme 64MiB --clients 4",
			func(r *ReplayReport) int64 { return r.WrongPages + r.LostPages }},
	} {
		t.Run(c.name, func(t *testing.T) {
			code, r := runSabotaged(t, c.switches, c.args)
			if n := c.count(r); n == 0 || code != 1 {
				t.Errorf("%d found, exit %d: want some, and 1\n%+v", n, code, r)
			}
			if code, r := runSabotaged(t, "", c.args); code != 0 || c.count(r) != 0 {
				t.Errorf("without the switch: %d found, exit %d\n%+v", c.count(r), code, r)
			}
		})
	}
}

// TestSabotagePublishFirst needs a kill between the record and the bytes of a
// page: many kills under load meet one.
func TestSabotagePublishFirst(t *testing.T) {
	crash := func(switches string) *CrashReport {
		r, err := Crash(t.Context(), CrashConfig{Rounds: 10, Seed: 1, TempDir: t.TempDir(),
			Node: NodeConfig{Program: program(t, "sabotage"), Env: []string{"KVTIER_SABOTAGE=" + switches}}})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	if r := crash("publish-first"); r.Err() == nil || r.CorruptPages+r.WrongPages+r.LostDurableBlocks == 0 {
		t.Errorf("nothing was found: %+v", r)
	}
	if r := crash(""); r.Err() != nil {
		t.Errorf("without the switch: %v %+v", r.Err(), r)
	}
}
