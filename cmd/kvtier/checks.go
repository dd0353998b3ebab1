package main

import (
	"context"
	"fmt"
	"math"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/bench"
)

// Verdicts of a check.
const (
	verdictOK   = "ok"
	verdictWarn = "warn" // works, slower or with less room than it could
	verdictFail = "fail" // a node with this configuration would not start or not work
)

// finding is the result of one check.
type finding struct {
	Check   string `json:"check"`
	Verdict string `json:"verdict"`
	Found   string `json:"found"`
	Mend    string `json:"mend,omitempty"`
}

// check is one thing to look at on a machine that shall run a node.
type check struct {
	name string
	// start is set for checks that serve makes before it touches anything.
	start bool
	run   func(ctx context.Context, h *host, c *nodeConfig) finding
}

func ok(format string, args ...any) finding {
	return finding{Verdict: verdictOK, Found: fmt.Sprintf(format, args...)}
}

func warn(mend, format string, args ...any) finding {
	return finding{Verdict: verdictWarn, Found: fmt.Sprintf(format, args...), Mend: mend}
}

func fail(mend, format string, args ...any) finding {
	return finding{Verdict: verdictFail, Found: fmt.Sprintf(format, args...), Mend: mend}
}

// checks lists all, in the order in which doctor prints them.
func checks() []check {
	return []check{
		{"kernel", true, checkKernel},
		{"memory", true, checkMemory},
		{"huge pages", true, checkHugePages},
		{"transparent huge pages", false, checkTHP},
		{"locked memory", false, checkLocked},
		{"open files", true, checkFiles},
		{"socket directory", false, checkSocketDir},
		{"data directory", false, checkDataDir},
		{"disk space", true, checkDiskSpace},
		{"direct I/O", false, checkDirect},
		{"disk speed", false, checkDiskSpeed},
		{"CUDA driver", false, checkCUDADriver},
		{"CUDA devices", false, checkCUDADevices},
		{"GPU sharing", false, checkSharing},
		{"peer access", false, checkPeers},
	}
}

// examine runs checks; all of them, or those of a start.
func examine(ctx context.Context, h *host, c *nodeConfig, startOnly bool) []finding {
	var out []finding
	for _, ch := range checks() {
		if startOnly && !ch.start {
			continue
		}
		f := ch.run(ctx, h, c)
		f.Check = ch.name
		out = append(out, f)
	}
	return out
}

func checkKernel(_ context.Context, h *host, _ *nodeConfig) finding {
	release, err := h.kernel()
	if err != nil {
		return fail("kvtier runs on Linux 5.1 or newer", "the kernel does not tell its version: %v", err)
	}
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil {
		return warn("", "cannot read version %q", release)
	}
	if major < 5 || major == 5 && minor < 1 {
		return fail("boot Linux 5.1 or newer", "Linux %s cannot seal memory against later writers (F_SEAL_FUTURE_WRITE came with 5.1)", release)
	}
	if err := h.seals(); err != nil {
		return fail("allow memfd_create and fcntl(F_ADD_SEALS) in the sandbox (seccomp profile) of this process", "Linux %s, but memory cannot be sealed: %v", release, err)
	}
	return ok("Linux %s, memory can be sealed against later writers", release)
}

// overheadBytes is what a node needs beside its arenas.
const overheadBytes = 256 << 20

func checkMemory(_ context.Context, h *host, c *nodeConfig) finding {
	need := int64(c.RAMBytes) + hostDeviceBytes(h, c) + overheadBytes
	room, err := h.meminfo("MemAvailable")
	if err != nil {
		return warn("mount /proc", "free memory is unknown: %v", err)
	}
	where := "the machine has " + bench.FormatBytes(room) + " available"
	if left, at, limited := h.cgroupRoom(); limited && left < room {
		room, where = left, fmt.Sprintf("%s leaves %s", at, bench.FormatBytes(left))
	}
	if c.HugePages && reservedBytes(h) >= int64(c.RAMBytes) {
		need -= int64(c.RAMBytes) // the arena comes out of the reserved pages
	}
	if room < need {
		device := hostDeviceBytes(h, c)
		fits := max(room-overheadBytes-device, 0) >> 20 << 20
		return fail(fmt.Sprintf("lower ram to %s or raise the limit", strings.ReplaceAll(bench.FormatBytes(fits), " ", "")),
			"%s; ram %s and %s for the rest need %s", where, bench.FormatBytes(int64(c.RAMBytes)), bench.FormatBytes(overheadBytes+device), bench.FormatBytes(need))
	}
	return ok("%s, the node needs %s", where, bench.FormatBytes(need))
}

// reservedBytes is what the huge pages that are reserved and free hold.
func reservedBytes(h *host) int64 {
	free, _ := h.meminfo("HugePages_Free")
	pageBytes, _ := h.meminfo("Hugepagesize")
	return free * pageBytes
}

func checkHugePages(_ context.Context, h *host, c *nodeConfig) finding {
	total, err := h.meminfo("HugePages_Total")
	if err != nil {
		return warn("", "the kernel has no huge pages: %v", err)
	}
	free, _ := h.meminfo("HugePages_Free")
	pageBytes, _ := h.meminfo("Hugepagesize")
	short := c.HugePages && reservedBytes(h) < int64(c.RAMBytes)
	if short && sharedTHP(h) {
		return ok("%d of %d huge pages of %s are free; the rest of the RAM tier gets transparent ones", free, total, bench.FormatBytes(pageBytes))
	}
	if short {
		pages := (int64(c.RAMBytes) + pageBytes - 1) / max(pageBytes, 1)
		return fail(fmt.Sprintf("sysctl -w vm.nr_hugepages=%d (beside those in use), or echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled, or set huge-pages: false", pages),
			"huge-pages is set and ram is %s, but %d of %d huge pages of %s are free", bench.FormatBytes(int64(c.RAMBytes)), free, total, bench.FormatBytes(pageBytes))
	}
	if c.HugePages {
		return ok("%d of %d huge pages of %s are free", free, total, bench.FormatBytes(pageBytes))
	}
	return warn("reserve huge pages (vm.nr_hugepages) and set huge-pages: true: copies are about 1.3 times as fast",
		"the RAM tier uses pages of 4 KiB where the kernel does not join them (Linux 6.1 and later do)")
}

// sharedTHP reports whether shared memory that asks for huge pages gets them.
func sharedTHP(h *host) bool {
	setting := h.word("sys/kernel/mm/transparent_hugepage/shmem_enabled")
	for _, value := range []string{"[always]", "[within_size]", "[advise]", "[force]"} {
		if strings.Contains(setting, value) {
			return true
		}
	}
	return false
}

func checkTHP(_ context.Context, h *host, c *nodeConfig) finding {
	setting := h.word("sys/kernel/mm/transparent_hugepage/shmem_enabled")
	switch {
	case setting == "":
		return warn("", "the kernel does not tell whether shared memory gets huge pages")
	case strings.Contains(setting, "[always]"), strings.Contains(setting, "[within_size]"), strings.Contains(setting, "[force]"):
		return ok("shared memory gets huge pages by itself (shmem_enabled: %s)", setting)
	case c.HugePages:
		return ok("not needed: the RAM tier gets huge pages another way")
	}
	return warn("echo within_size > /sys/kernel/mm/transparent_hugepage/shmem_enabled", "shared memory gets no huge pages by itself (shmem_enabled: %s)", setting)
}

func checkLocked(_ context.Context, h *host, c *nodeConfig) finding {
	limit, err := h.rlimit(unix.RLIMIT_MEMLOCK)
	if err != nil {
		return warn("", "the limit of locked memory is unknown: %v", err)
	}
	text := "unlimited"
	if limit != math.MaxUint64 {
		text = bench.FormatBytes(int64(min(limit, math.MaxInt64)))
	}
	if limit < uint64(c.RAMBytes) && h.uid != 0 {
		return warn("only engines that register pages with a GPU or an RDMA card need it: LimitMEMLOCK=infinity, or ulimit -l unlimited, for the engine",
			"%s can be locked, less than ram %s", text, bench.FormatBytes(int64(c.RAMBytes)))
	}
	return ok("%s", text)
}

// minFiles covers connections, extents, segments and the manifest.
const minFiles = 4096

func checkFiles(_ context.Context, h *host, c *nodeConfig) finding {
	limit, err := h.rlimit(unix.RLIMIT_NOFILE)
	if err != nil {
		return warn("", "the limit of open files is unknown: %v", err)
	}
	need := uint64(256) + uint64(c.NVMeBytes>>28) + uint64(c.RAMBytes>>30)
	switch {
	case limit < need:
		return fail("LimitNOFILE=65536, or ulimit -n 65536", "%d files can be open, a node of this size needs %d", limit, need)
	case limit < minFiles:
		return warn("LimitNOFILE=65536, or ulimit -n 65536", "%d files can be open, enough for few clients", limit)
	}
	return ok("%d", limit)
}

func checkSocketDir(_ context.Context, h *host, c *nodeConfig) finding {
	return checkDir(h, filepath.Dir(c.Socket), "socket")
}

func checkDataDir(_ context.Context, h *host, c *nodeConfig) finding {
	if c.Dir == "" {
		return ok("not needed: the node keeps pages in RAM only")
	}
	return checkDir(h, c.Dir, "dir")
}

func checkDir(h *host, dir, setting string) finding {
	info, err := h.statDir(dir)
	mend := fmt.Sprintf("install -d -o %d %s, or set %s to a directory of yours", h.uid, dir, setting)
	switch {
	case err != nil:
		return fail(mend, "%v", err)
	case !info.writable:
		return fail(mend, "user %d cannot write to %s", h.uid, info.path)
	case !info.exists:
		return ok("%s will be made", dir)
	}
	return ok("%s", dir)
}

func checkDiskSpace(_ context.Context, h *host, c *nodeConfig) finding {
	if c.nvmeDir() == "" {
		return ok("not needed: there is no NVMe tier")
	}
	info, err := h.statDir(c.nvmeDir())
	if err != nil {
		return fail("set dir to a directory on the NVMe disk", "%v", err)
	}
	used, _ := h.dirBytes(c.nvmeDir())
	if have := info.free + used; have < int64(c.NVMeBytes) {
		return fail(fmt.Sprintf("lower nvme to %s or free space", strings.ReplaceAll(bench.FormatBytes(have>>20<<20), " ", "")),
			"%s has %s for the tier (%s of it in use by it), nvme is %s", info.path, bench.FormatBytes(have), bench.FormatBytes(used), bench.FormatBytes(int64(c.NVMeBytes)))
	}
	return ok("%s free on %s (%s), nvme is %s", bench.FormatBytes(info.free), info.path, info.fsType, bench.FormatBytes(int64(c.NVMeBytes)))
}

func checkDirect(_ context.Context, h *host, c *nodeConfig) finding {
	if c.nvmeDir() == "" {
		return ok("not needed: there is no NVMe tier")
	}
	info, err := h.statDir(c.nvmeDir())
	if err != nil {
		return fail("set dir to a directory on the NVMe disk", "%v", err)
	}
	if err := h.direct(info.path); err != nil {
		return warn("put dir on ext4 or xfs on a local disk", "%s (%s) does not take O_DIRECT (%v): reads and writes go through the page cache", info.path, info.fsType, err)
	}
	return ok("%s (%s) takes O_DIRECT", info.path, info.fsType)
}

// slowDisk is the read speed under which recomputing may be cheaper than reading.
const slowDisk = 500e6

func checkDiskSpeed(ctx context.Context, h *host, c *nodeConfig) finding {
	if c.nvmeDir() == "" {
		return ok("not needed: there is no NVMe tier")
	}
	info, err := h.statDir(c.nvmeDir())
	if err != nil {
		return fail("set dir to a directory on the NVMe disk", "%v", err)
	}
	if info.free < 2*probeBytes {
		return warn("free some space", "not measured: %s has only %s free", info.path, bench.FormatBytes(info.free))
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	write, read, err := h.diskSpeed(ctx, info.path)
	switch {
	case err != nil:
		return warn("", "not measured: %v", err)
	case read < slowDisk:
		return warn("put dir on a local NVMe disk", "%s writes %.2f and reads %.2f GB/s", info.path, write/1e9, read/1e9)
	}
	return ok("%s writes %.2f and reads %.2f GB/s", info.path, write/1e9, read/1e9)
}
