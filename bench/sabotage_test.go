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
	"time"
)

// smallArgs is the demo with pages of 4 KiB and tiers in proportion.
const smallArgs = "bench replay -o json --block-bytes 4KiB --ram 4MiB --nvme 64MiB"

// runSabotaged runs a command line of the program that was built with the
// sabotage tag, with some switches on, decodes its report and returns its exit code.
func runSabotaged(t *testing.T, switches, args string, report any) int {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program(t, "sabotage"), append(strings.Fields(args), "--temp-dir", clusterTempDir(t))...)
	cmd.Env = append(os.Environ(), "KVTIER_SABOTAGE="+switches)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if err := json.Unmarshal(stdout.Bytes(), report); err != nil {
		t.Fatalf("no report: %v\n%s%s", err, stdout.String(), stderr.String())
	}
	return cmd.ProcessState.ExitCode()
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
		{"wrong-block-table", "wrong-block-table", "demo -o json", func(r *ReplayReport) int64 { return r.WrongDecodes }},
		{"skip-device-copy", "skip-device-copy", "demo -o json", func(r *ReplayReport) int64 { return r.WrongPages }},
		{"neighbour-page in the demo of a cluster", "neighbour-page", "demo --nodes 3 -o json", func(r *ReplayReport) int64 { return r.WrongPages }},
		{"reuse-leased-slot", "reuse-leased-slot", "bench replay -o json --block-bytes 4KiB --ram 2MiB --nvme 64MiB --clients 4",
			func(r *ReplayReport) int64 { return r.WrongPages + r.LostPages }},
	} {
		t.Run(c.name, func(t *testing.T) {
			var r, zero ReplayReport
			code := runSabotaged(t, c.switches, c.args, &r)
			if n := c.count(&r); n == 0 || code != 1 {
				t.Errorf("%d found, exit %d: want some, and 1\n%+v", n, code, r)
			}
			if code := runSabotaged(t, "", c.args, &zero); code != 0 || c.count(&zero) != 0 {
				t.Errorf("without the switch: %d found, exit %d\n%+v", c.count(&zero), code, zero)
			}
		})
	}
}

// TestSabotagePublishFirst needs a kill between the record and the bytes of a
// page: many kills under load meet one.
func TestSabotagePublishFirst(t *testing.T) {
	const crash = "bench crash -o json --seed 1 --rounds "
	found := func(r *CrashReport) int64 { return r.CorruptPages + r.WrongPages + r.LostDurableBlocks }
	var r, zero CrashReport
	code := runSabotaged(t, "publish-first", crash+"10", &r)
	if found(&r) == 0 || code != 1 {
		t.Errorf("%d found, exit %d: want some, and 1\n%+v", found(&r), code, r)
	}
	if code := runSabotaged(t, "", crash+"2", &zero); code != 0 || found(&zero) != 0 {
		t.Errorf("without the switch: %d found, exit %d\n%+v", found(&zero), code, zero)
	}
}

// TestSabotageDropClaimReleases: claims that were released stay.
func TestSabotageDropClaimReleases(t *testing.T) {
	t.Setenv("KVTIER_SABOTAGE", "drop-claim-releases")
	r, err := Directory(t.Context(), DirectoryConfig{Claims: 3000, More: 600, Within: 5 * time.Second, Program: program(t, "sabotage"), TempDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	if r.Err() == nil || r.WrongClaims != 3*600 {
		t.Errorf("%d wrong claims, want %d: three nodes keep 600 each", r.WrongClaims, 3*600)
	}
}

// A move whose target is not asked what it lacks leaves the session's blocks behind, and
// the act of the demo counts them.
func TestSabotagedMoveIsFound(t *testing.T) {
	var r ClusterReport
	if code := runSabotaged(t, "skip-target-check", "demo --nodes 3 -o json", &r); code != 1 || r.Session == nil || r.Session.Recomputed == 0 {
		t.Errorf("exit %d, %+v", code, r.Session)
	}
}
