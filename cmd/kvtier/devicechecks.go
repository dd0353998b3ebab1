package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/kvtier/kvtier/bench"
	"github.com/kvtier/kvtier/gpu"
	"github.com/kvtier/kvtier/gpu/cuda"
	"github.com/kvtier/kvtier/server"
)

// minCUDA is the API version from which on drivers take the kernels (PTX 7.8).
const minCUDA = 11080

// wantsCUDA says whether the configuration cannot do without a CUDA device.
func wantsCUDA(c *nodeConfig) bool {
	kind, _, err := server.ParseDevice(c.Device)
	return c.HBMBytes > 0 && err == nil && kind == server.DeviceCUDA
}

// missing is what a lack of something CUDA means: the node cannot start, or the
// host device serves.
func missing(c *nodeConfig, mend, format string, args ...any) finding {
	if wantsCUDA(c) {
		return fail(mend+", or set device to host", format, args...)
	}
	f := ok(format+": the host device serves", args...)
	f.Mend = mend + ", if this machine has a GPU"
	return f
}

func probe() (cuda.Report, error) { return cuda.Probe(os.Getenv(cudaLibraryEnv)) }

func checkCUDADriver(_ context.Context, h *host, c *nodeConfig) finding {
	r, err := h.probe()
	version := fmt.Sprintf("driver with CUDA %d.%d", r.DriverVersion/1000, r.DriverVersion%1000/10)
	switch {
	case errors.Is(err, gpu.ErrNoDevice) && r.DriverVersion == 0:
		return missing(c, "install the NVIDIA driver so that libcuda.so.1 is found (in a container: the NVIDIA container toolkit), or name the library in "+cudaLibraryEnv, "no CUDA driver (%v)", err)
	case len(r.Missing) > 0:
		return missing(c, "update the driver to 520 or newer", "%s, which lacks %s", version, strings.Join(r.Missing, ", "))
	case err != nil:
		return missing(c, "look at dmesg and nvidia-smi", "%s, but: %v", version, err)
	case r.DriverVersion < minCUDA:
		return missing(c, "update the driver to 520 or newer", "%s, too old for the kernels", version)
	}
	batch := "copies small pages with a kernel, no batch copies (they came with 12.8)"
	if r.BatchCopies {
		batch = "has batch copies"
	}
	return ok("%s, %s", version, batch)
}

func checkCUDADevices(_ context.Context, h *host, c *nodeConfig) finding {
	r, err := h.probe()
	if err != nil || len(r.Devices) == 0 {
		return missing(c, "make the devices visible (CUDA_VISIBLE_DEVICES, /dev/nvidia*)", "no CUDA device")
	}
	var names []string
	for _, d := range r.Devices {
		names = append(names, fmt.Sprintf("cuda:%d %s, %s, compute %s", d.Ordinal, d.Name, bench.FormatBytes(d.TotalBytes), d.Compute))
		if !d.VMM || !d.PosixFD {
			return warn("use a device and driver with virtual memory management and POSIX handles (some vGPU profiles have none)",
				"cuda:%d %s cannot export memory as a descriptor: pools go by the driver's older handles, which end with the node", d.Ordinal, d.Name)
		}
	}
	kind, ordinal, err := server.ParseDevice(c.Device)
	if err == nil && kind == server.DeviceCUDA && ordinal >= len(r.Devices) {
		return fail(fmt.Sprintf("set device to cuda:0 to cuda:%d", len(r.Devices)-1), "device is %s: %s", c.Device, strings.Join(names, "; "))
	}
	if err == nil && kind != server.DeviceHost && c.HBMBytes > 0 && ordinal < len(r.Devices) && int64(c.HBMBytes) > r.Devices[ordinal].TotalBytes {
		return fail("lower hbm: leave room for the model and its activations", "hbm is %s: %s", bench.FormatBytes(int64(c.HBMBytes)), names[ordinal])
	}
	return ok("%s", strings.Join(names, "; "))
}

// checkSharing looks for what shares a GPU: MIG cuts it, MPS lets processes in
// together.
func checkSharing(_ context.Context, h *host, _ *nodeConfig) finding {
	mig, _ := fs.Glob(h.files, "proc/driver/nvidia/capabilities/gpu*/mig/gi*")
	mps, _ := fs.Glob(h.files, "tmp/nvidia-mps/control")
	_, err := h.probe()
	switch {
	case err != nil && len(mig)+len(mps) == 0:
		return ok("no CUDA device to be shared")
	case len(mig) > 0:
		return warn("name the instance in CUDA_VISIBLE_DEVICES for the node and the engine alike; pools of one instance cannot be mapped in another",
			"MIG is on: %d instances", len(mig))
	case len(mps) > 0:
		return warn("start the node and the engines under the same MPS server: processes outside of it cannot map each other's pool", "an MPS server runs")
	}
	return ok("neither MIG nor MPS")
}

func checkPeers(_ context.Context, h *host, _ *nodeConfig) finding {
	r, err := h.probe()
	if err != nil || len(r.Devices) < 2 {
		return ok("not needed: fewer than two CUDA devices")
	}
	var apart []string
	for i, d := range r.Devices {
		for j, can := range d.Peers {
			if i != j && !can {
				apart = append(apart, fmt.Sprintf("cuda:%d to cuda:%d", i, j))
			}
		}
	}
	if len(apart) > 0 {
		return warn("run a node for each device whose engines cannot reach the other (look at nvidia-smi topo -m; ACS and IOMMU settings switch peer access off)", "no peer access: %s", strings.Join(apart, ", "))
	}
	return ok("every device reaches every other")
}

// hostDeviceBytes is what an HBM tier takes of the machine's memory: all of it on
// a host device.
func hostDeviceBytes(h *host, c *nodeConfig) int64 {
	kind, _, _ := server.ParseDevice(c.Device)
	if c.HBMBytes == 0 || kind == server.DeviceCUDA {
		return 0
	}
	if kind == server.DeviceAuto {
		if r, err := h.probe(); err == nil && len(r.Devices) > 0 {
			return 0
		}
	}
	return int64(c.HBMBytes) + deviceSlack
}
