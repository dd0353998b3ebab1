package main

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"testing/fstest"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/gpu"
	"github.com/kvtier/kvtier/gpu/cuda"
)

// goodHost is a machine on which every check is content.
func goodHost() *host {
	return &host{
		files: fstest.MapFS{
			"proc/meminfo":                                     {Data: []byte("MemTotal: 67108864 kB\nMemAvailable:   33554432 kB\nHugePages_Total:    1024\nHugePages_Free:    1024\nHugepagesize:       2048 kB\n")},
			"proc/self/cgroup":                                 {Data: []byte("0::/app\n")},
			"sys/fs/cgroup/app/memory.max":                     {Data: []byte("17179869184\n")},
			"sys/fs/cgroup/app/memory.current":                 {Data: []byte("1073741824\n")},
			"sys/kernel/mm/transparent_hugepage/shmem_enabled": {Data: []byte("always [within_size] advise never deny force\n")},
		},
		uid:    1000,
		rlimit: func(int) (uint64, error) { return math.MaxUint64, nil },
		kernel: func() (string, error) { return "6.18.3-generic", nil },
		statDir: func(dir string) (dirInfo, error) {
			return dirInfo{path: dir, exists: true, writable: true, free: 100 << 30, fsType: "ext4"}, nil
		},
		direct:    func(string) error { return nil },
		diskSpeed: func(context.Context, string) (float64, float64, error) { return 2e9, 1.2e9, nil },
		seals:     func() error { return nil },
		probe:     func() (cuda.Report, error) { return twoGPUs(), nil },
	}
}

// twoGPUs is a machine with two devices that reach each other.
func twoGPUs() cuda.Report {
	d := cuda.DeviceReport{Name: "GPU", TotalBytes: 80 << 30, Compute: "9.0", VMM: true, PosixFD: true, Peers: []bool{true, true}}
	r := cuda.Report{DriverVersion: 12080, BatchCopies: true, Devices: []cuda.DeviceReport{d, d}}
	r.Devices[1].Ordinal = 1
	return r
}

func goodConfig() *nodeConfig {
	c := defaultConfig().withDefaults()
	c.HugePages, c.RAMBytes = true, 1<<30
	return &c
}

func TestDoctorContent(t *testing.T) {
	for _, f := range examine(t.Context(), goodHost(), goodConfig(), false) {
		if f.Verdict != verdictOK || f.Mend != "" {
			t.Errorf("%s: %s, %s (%s)", f.Check, f.Verdict, f.Found, f.Mend)
		}
	}
}

func TestDoctorFinds(t *testing.T) {
	files := func(h *host, name, text string) { h.files.(fstest.MapFS)[name] = &fstest.MapFile{Data: []byte(text)} }
	for _, c := range []struct {
		name    string
		spoil   func(h *host, c *nodeConfig)
		check   string
		verdict string
		found   string
		mend    string
	}{
		{"no driver", func(h *host, c *nodeConfig) {
			h.probe = func() (cuda.Report, error) { return cuda.Report{}, gpu.ErrNoDevice }
			c.HBMBytes, c.Device = 1<<30, "cuda:0"
		}, "CUDA driver", verdictFail, "no CUDA driver", "set device to host"},
		{"no driver and none wanted", func(h *host, _ *nodeConfig) {
			h.probe = func() (cuda.Report, error) { return cuda.Report{}, gpu.ErrNoDevice }
		}, "CUDA driver", verdictOK, "the host device serves", "if this machine has a GPU"},
		{"old driver", func(h *host, c *nodeConfig) {
			h.probe = func() (cuda.Report, error) {
				return cuda.Report{DriverVersion: 11040, Missing: []string{"cuMemCreate"}}, gpu.ErrDriver
			}
			c.HBMBytes, c.Device = 1<<30, "cuda:0"
		}, "CUDA driver", verdictFail, "CUDA 11.4, which lacks cuMemCreate", "520"},
		{"no such device", func(_ *host, c *nodeConfig) { c.HBMBytes, c.Device = 1<<30, "cuda:2" }, "CUDA devices", verdictFail, "cuda:1 GPU", "cuda:0 to cuda:1"},
		{"small device", func(_ *host, c *nodeConfig) { c.HBMBytes, c.Device = 90<<30, "cuda:0" }, "CUDA devices", verdictFail, "hbm is 90 GiB", "lower hbm"},
		{"no export", func(h *host, c *nodeConfig) {
			h.probe = func() (cuda.Report, error) { r := twoGPUs(); r.Devices[0].PosixFD = false; return r, nil }
			c.HBMBytes, c.Device = 1<<30, "cuda:0"
		}, "CUDA devices", verdictWarn, "older handles", "POSIX handles"},
		{"MIG", func(h *host, _ *nodeConfig) {
			files(h, "proc/driver/nvidia/capabilities/gpu0/mig/gi1/access", "")
		}, "GPU sharing", verdictWarn, "MIG is on: 1 instances", "CUDA_VISIBLE_DEVICES"},
		{"MPS", func(h *host, _ *nodeConfig) { files(h, "tmp/nvidia-mps/control", "") }, "GPU sharing", verdictWarn, "MPS", "same MPS server"},
		{"no peers", func(h *host, _ *nodeConfig) {
			h.probe = func() (cuda.Report, error) { r := twoGPUs(); r.Devices[0].Peers = []bool{true, false}; return r, nil }
		}, "peer access", verdictWarn, "cuda:0 to cuda:1", "nvidia-smi topo"},
		{"a host device in memory", func(h *host, c *nodeConfig) { c.HBMBytes, c.Device = 30<<30, "host" }, "memory", verdictFail, "need", "lower"},
		{"old kernel", func(h *host, _ *nodeConfig) { h.kernel = func() (string, error) { return "4.19.0", nil } },
			"kernel", verdictFail, "4.19.0 cannot seal", "Linux 5.1"},
		{"no seals", func(h *host, _ *nodeConfig) { h.seals = func() error { return unix.EPERM } },
			"kernel", verdictFail, "cannot be sealed", "seccomp"},
		{"little memory", func(h *host, c *nodeConfig) {
			c.HugePages = false
			files(h, "proc/meminfo", "MemAvailable: 524288 kB\n")
		},
			"memory", verdictFail, "512 MiB available", "lower ram to 256MiB"},
		{"cgroup of 2 GiB, pool of 8 GiB", func(h *host, c *nodeConfig) {
			c.RAMBytes, c.HugePages = 8<<30, false
			files(h, "sys/fs/cgroup/app/memory.max", "2147483648\n")
		}, "memory", verdictFail, "/sys/fs/cgroup/app/memory.max leaves 1 GiB", "lower ram to 768MiB"},
		{"limit of a parent group", func(h *host, c *nodeConfig) {
			c.HugePages = false
			files(h, "proc/self/cgroup", "0::/app/inner\n")
			files(h, "sys/fs/cgroup/app/memory.max", "1073741825\n")
		}, "memory", verdictFail, "/sys/fs/cgroup/app/memory.max leaves", "lower ram"},
		{"cgroup version 1", func(h *host, c *nodeConfig) {
			c.HugePages = false
			files(h, "proc/self/cgroup", "3:cpu,memory:/old\n")
			files(h, "sys/fs/cgroup/memory/old/memory.limit_in_bytes", "536870912\n")
			files(h, "sys/fs/cgroup/memory/old/memory.usage_in_bytes", "0\n")
		}, "memory", verdictFail, "memory.limit_in_bytes leaves 512 MiB", "lower ram"},
		{"no huge pages", func(h *host, _ *nodeConfig) {
			files(h, "sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size advise [never] deny force\n")
			files(h, "proc/meminfo", "MemAvailable: 33554432 kB\nHugePages_Total: 0\nHugePages_Free: 0\nHugepagesize: 2048 kB\n")
		}, "huge pages", verdictFail, "0 of 0 huge pages", "vm.nr_hugepages=512"},
		{"transparent ones instead", func(h *host, _ *nodeConfig) {
			files(h, "proc/meminfo", "MemAvailable: 33554432 kB\nHugePages_Total: 0\nHugePages_Free: 0\nHugepagesize: 2048 kB\n")
			files(h, "sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size [advise] never deny force\n")
		}, "huge pages", verdictOK, "transparent", ""},
		{"huge pages not used", func(_ *host, c *nodeConfig) { c.HugePages = false },
			"huge pages", verdictWarn, "4 KiB", "vm.nr_hugepages"},
		{"shmem_enabled never", func(h *host, c *nodeConfig) {
			c.HugePages = false
			files(h, "sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size advise [never] deny force\n")
		}, "transparent huge pages", verdictWarn, "never", "within_size"},
		{"locked memory 64K", func(h *host, _ *nodeConfig) { h.rlimit = func(int) (uint64, error) { return 64 << 10, nil } },
			"locked memory", verdictWarn, "64 KiB", "LimitMEMLOCK"},
		{"few files", func(h *host, _ *nodeConfig) { h.rlimit = func(int) (uint64, error) { return 64, nil } },
			"open files", verdictFail, "64 files", "LimitNOFILE"},
		{"1024 files", func(h *host, _ *nodeConfig) { h.rlimit = func(int) (uint64, error) { return 1024, nil } },
			"open files", verdictWarn, "1024 files", "LimitNOFILE"},
		{"read-only socket directory", func(h *host, _ *nodeConfig) {
			h.statDir = func(dir string) (dirInfo, error) { return dirInfo{path: "/run", free: 100 << 30}, nil }
		}, "socket directory", verdictFail, "user 1000 cannot write to /run", "install -d"},
		{"disk too small", func(_ *host, c *nodeConfig) { c.NVMeBytes = 1 << 40 },
			"disk space", verdictFail, "nvme is 1 TiB", "lower nvme to 100GiB"},
		{"no O_DIRECT", func(h *host, _ *nodeConfig) { h.direct = func(string) error { return unix.EINVAL } },
			"direct I/O", verdictWarn, "does not take O_DIRECT", "ext4 or xfs"},
		{"slow disk", func(h *host, _ *nodeConfig) {
			h.diskSpeed = func(context.Context, string) (float64, float64, error) { return 1e8, 1e8, nil }
		}, "disk speed", verdictWarn, "reads 0.10 GB/s", "local NVMe"},
		{"disk cannot be measured", func(h *host, _ *nodeConfig) {
			h.diskSpeed = func(context.Context, string) (float64, float64, error) { return 0, 0, errors.New("no luck") }
		}, "disk speed", verdictWarn, "no luck", ""},
		{"no /proc", func(h *host, _ *nodeConfig) { delete(h.files.(fstest.MapFS), "proc/meminfo") },
			"memory", verdictWarn, "unknown", "mount /proc"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h, cfg := goodHost(), goodConfig()
			c.spoil(h, cfg)
			for _, f := range examine(t.Context(), h, cfg, false) {
				if f.Check != c.check {
					continue
				}
				if f.Verdict != c.verdict || !strings.Contains(f.Found, c.found) || !strings.Contains(f.Mend, c.mend) {
					t.Errorf("got %+v, want %s %q %q", f, c.verdict, c.found, c.mend)
				}
				return
			}
			t.Errorf("no check %q", c.check)
		})
	}
}

func TestThisMachineCanBeRead(t *testing.T) {
	c := goodConfig()
	c.Dir = t.TempDir()
	c.Socket, c.HugePages = c.Dir+"/s.sock", false
	h := thisHost()
	h.diskSpeed = func(context.Context, string) (float64, float64, error) { return 1e9, 1e9, nil }
	for _, f := range examine(t.Context(), h, c, false) {
		if f.Found == "" {
			t.Errorf("%s found nothing: %+v", f.Check, f)
		}
	}
}
