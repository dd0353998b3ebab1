package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"github.com/kvtier/kvtier/gpu"
)

// torch has a Python process map a pool and compare an attention of ours, over
// pages in place, with PyTorch's. A machine without python3 leaves it out.
func torch(ctx context.Context, d gpu.Device, o options) (json.RawMessage, error) {
	python, err := exec.LookPath("python3")
	if err != nil {
		return json.RawMessage(`"no python3"`), nil
	}
	x, _, err := newDecode(ctx, d, gpu.BF16, 2, 300)
	if err != nil {
		return nil, err
	}
	defer x.free() //nolint:errcheck // the error that matters is the one before
	if err := errors.Join(x.stream.Launch(&x.Attention), gpu.Sync(ctx, x.stream)); err != nil {
		return nil, err
	}
	layout, err := json.Marshal(map[string]any{
		"library": o.library, "ordinal": o.ordinal, "bytes": x.mem.Size(), "q": x.Q - x.mem.Addr(), "out": x.Out - x.mem.Addr(), "pool": x.Pool - x.mem.Addr(),
		"pages": x.Pages, "page_tokens": pageTokens, "kv_heads": x.KVHeads, "q_heads": x.QHeads, "dim": x.HeadDim,
		"tables": [][]int32{x.Table[:x.MaxPages], x.Table[x.MaxPages:]}, "lengths": x.SeqLens,
	})
	if err != nil {
		return nil, err
	}
	var answer json.RawMessage
	err = withExport(x.mem, func(f *os.File) error {
		cmd := exec.CommandContext(ctx, python, filepath.Join(o.dir, "consumer.py"), string(layout))
		cmd.ExtraFiles = []*os.File{f}
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			return fmt.Errorf("%w: %.2000s", err, stderr.Bytes())
		}
		answer = json.RawMessage(bytes.TrimSpace(out))
		return nil
	})
	return answer, err
}

// put and get move bytes between the CPU and the device.
func put(ctx context.Context, d gpu.Device, s gpu.Stream, dst gpu.Addr, b []byte) error {
	return pinned(d, len(b), func(h gpu.Mem, mem []byte) error {
		copy(mem, b)
		return errors.Join(s.Copy([]gpu.Copy{{Dst: dst, Src: h.Addr(), Bytes: int64(len(b))}}), gpu.Sync(ctx, s))
	})
}

func get(ctx context.Context, d gpu.Device, s gpu.Stream, src gpu.Addr, b []byte) error {
	return pinned(d, len(b), func(h gpu.Mem, mem []byte) error {
		err := errors.Join(s.Copy([]gpu.Copy{{Dst: h.Addr(), Src: src, Bytes: int64(len(b))}}), gpu.Sync(ctx, s))
		copy(b, mem)
		return err
	})
}

func pinned(d gpu.Device, n int, use func(h gpu.Mem, mem []byte) error) error {
	mem, err := syscall.Mmap(-1, 0, (n+4095)/4096*4096, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	if err != nil {
		return err
	}
	h, err := d.Register(mem)
	if err != nil {
		return errors.Join(err, syscall.Munmap(mem))
	}
	return errors.Join(use(h, mem), h.Free(), syscall.Munmap(mem))
}
