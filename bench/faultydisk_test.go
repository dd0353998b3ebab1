package bench

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// testDisk is the room of a node's data: its tier, the directory's log, little else.
const testDisk = 640 << 20

// mountDisk puts a file system of its own under the data of a node.
func mountDisk(t *testing.T, dir string) {
	t.Helper()
	image, at := filepath.Join(dir, "disk"), filepath.Join(dir, "data")
	f, err := os.Create(image)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(testDisk); err != nil {
		t.Fatal(err)
	}
	f.Close()
	if err := os.Mkdir(at, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"mkfs.ext4", "-q", "-F", image}, {"mount", "-o", "loop,noatime", image, at}} {
		if text, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Skipf("a file system for each node is not permitted here: %v: %v %s", args, err, text)
		}
	}
	t.Cleanup(func() {
		if text, err := exec.Command("umount", at).CombinedOutput(); err != nil {
			t.Errorf("umount: %v %s", err, text)
		}
	})
	if err := os.Remove(filepath.Join(at, "lost+found")); err != nil {
		t.Fatal(err)
	}
}

func (c *faultCluster) data(i int) string { return filepath.Join(c.fleet.nodes[i].cfg.Dir, "data") }

// fill takes all room that is left on the disk of a follower.
func (c *faultCluster) fill() (resumed, mended time.Duration) {
	o, err := c.prepare(c.t.Context(), killOther)
	c.check(err)
	filler := filepath.Join(c.data(o.victim), "filler")
	// dd ends with an error when the disk is full, which is the purpose.
	_ = exec.CommandContext(c.t.Context(), "dd", "if=/dev/zero", "of="+filler, "bs=1M").Run()
	resumed = c.others(o.victim)
	c.pause(apartFor)
	c.check(os.Remove(filler))
	return resumed, c.back(o.victim, o)
}

// hang holds up every write to the disk of the leader.
func (c *faultCluster) hang() (resumed, mended time.Duration) {
	o, err := c.prepare(c.t.Context(), killLeader)
	c.check(err)
	at := c.data(o.victim)
	c.check(exec.Command("fsfreeze", "--freeze", at).Run())
	thawed := false
	thaw := func() {
		if !thawed {
			thawed = true
			if err := exec.Command("fsfreeze", "--unfreeze", at).Run(); err != nil {
				c.t.Errorf("unfreeze: %v", err)
			}
		}
	}
	defer thaw() // a frozen file system holds up the end of the test as well
	resumed = c.others(o.victim)
	c.pause(apartFor)
	thaw()
	return resumed, c.back(o.victim, o)
}

// TestDiskFaultsOfRealNodes gives each node a disk that fills up, or answers no more.
func TestDiskFaultsOfRealNodes(t *testing.T) {
	if os.Getenv("KVTIER_TORTURE") == "" {
		t.Skip("for make torture")
	}
	startFaultCluster(t, func(_ int, dir string) { mountDisk(t, dir) }).run([]fault{
		{"disk of a follower full", false, false, false, (*faultCluster).fill},
		{"log disk of the leader hangs", false, false, false, (*faultCluster).hang},
	})
}
