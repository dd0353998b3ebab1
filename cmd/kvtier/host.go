package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/gpu/cuda"
)

// host is what the checks read of the machine. Tests replace any of it.
type host struct {
	files     fs.FS // the root directory: /proc and /sys are read through it
	uid       int
	rlimit    func(resource int) (limit uint64, err error)
	kernel    func() (string, error)
	statDir   func(dir string) (dirInfo, error)
	direct    func(dir string) error                                                 // tries O_DIRECT there
	diskSpeed func(ctx context.Context, dir string) (write, read float64, err error) // bytes/s
	seals     func() error                                                           // tries a sealed memfd
	probe     func() (cuda.Report, error)                                            // looks for CUDA devices
}

// dirInfo is a directory, or the nearest parent that exists.
type dirInfo struct {
	path     string // what was looked at
	exists   bool   // path is the directory asked for
	writable bool
	free     int64 // bytes
	fsType   string
}

// thisHost reads the real machine.
func thisHost() *host {
	return &host{
		files: os.DirFS("/"), uid: os.Geteuid(),
		rlimit: func(resource int) (uint64, error) {
			var r unix.Rlimit
			err := unix.Getrlimit(resource, &r)
			return r.Cur, err
		},
		kernel: func() (string, error) {
			var u unix.Utsname
			err := unix.Uname(&u)
			return unix.ByteSliceToString(u.Release[:]), err
		},
		statDir: statDir, direct: tryDirect, diskSpeed: measureDisk, seals: trySeals, probe: probe,
	}
}

func statDir(dir string) (dirInfo, error) {
	info := dirInfo{path: dir, exists: true}
	for {
		if st, err := os.Stat(info.path); err == nil && st.IsDir() {
			break
		} else if err == nil {
			return info, fmt.Errorf("%s is no directory", info.path)
		} else if !errors.Is(err, fs.ErrNotExist) || info.path == filepath.Dir(info.path) {
			return info, err
		}
		info.path, info.exists = filepath.Dir(info.path), false
	}
	var st unix.Statfs_t
	if err := unix.Statfs(info.path, &st); err != nil {
		return info, fmt.Errorf("statfs %s: %w", info.path, err)
	}
	info.free = int64(st.Bavail) * st.Bsize //nolint:gosec // block counts of real disks fit
	info.writable = unix.Access(info.path, unix.W_OK|unix.X_OK) == nil
	info.fsType = fsName(st.Type)
	return info, nil
}

func fsName(magic int64) string {
	switch magic {
	case unix.TMPFS_MAGIC:
		return "tmpfs"
	case unix.EXT4_SUPER_MAGIC:
		return "ext4"
	case unix.XFS_SUPER_MAGIC:
		return "xfs"
	case unix.BTRFS_SUPER_MAGIC:
		return "btrfs"
	case unix.OVERLAYFS_SUPER_MAGIC:
		return "overlayfs"
	case unix.NFS_SUPER_MAGIC:
		return "nfs"
	}
	return fmt.Sprintf("%#x", magic)
}

// tryDirect writes one block past the page cache into a file of its own.
func tryDirect(dir string) error {
	f, buf, err := directFile(dir, unix.O_RDWR, 4096)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.WriteAt(buf, 0)
	return err
}

// directFile makes an O_DIRECT file without a name in dir, and a buffer whose
// memory is aligned to pages. The kernel removes the file when it is closed.
func directFile(dir string, flags, bytes int) (*os.File, []byte, error) {
	fd, err := unix.Open(dir, flags|unix.O_DIRECT|unix.O_TMPFILE|unix.O_CLOEXEC, 0o600)
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EISDIR) {
		fd, err = namedDirect(dir, flags)
	}
	if err != nil {
		return nil, nil, &fs.PathError{Op: "open with O_DIRECT in", Path: dir, Err: err}
	}
	buf, err := unix.Mmap(-1, 0, bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return nil, nil, errors.Join(err, unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), filepath.Join(dir, "probe")), buf, nil //nolint:gosec // a descriptor is not negative
}

// namedDirect serves file systems without O_TMPFILE: the name goes at once.
func namedDirect(dir string, flags int) (int, error) {
	name := filepath.Join(dir, fmt.Sprintf(".kvtier-probe-%d", os.Getpid()))
	fd, err := unix.Open(name, flags|unix.O_DIRECT|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return -1, err
	}
	return fd, unix.Unlink(name)
}

// probeBytes is what measureDisk writes and reads, in pieces of probePiece.
const (
	probeBytes = 256 << 20
	probePiece = 1 << 20
)

// measureDisk writes a file without a name, syncs it and reads it back, all
// past the page cache. Bounded by ctx between pieces.
func measureDisk(ctx context.Context, dir string) (write, read float64, err error) {
	f, buf, err := directFile(dir, unix.O_RDWR, probePiece)
	if err != nil {
		return 0, 0, err
	}
	defer f.Close()
	defer unix.Munmap(buf) //nolint:errcheck // a mapping made above
	for i := range buf {
		buf[i] = byte(i*7 + i>>8)
	}
	pass := func(op func(b []byte, at int64) (int, error)) (float64, error) {
		start, done := time.Now(), int64(0)
		for ; done < probeBytes && ctx.Err() == nil; done += probePiece {
			if _, err := op(buf, done); err != nil {
				return 0, err
			}
		}
		if err := f.Sync(); err != nil {
			return 0, err
		}
		return float64(done) / time.Since(start).Seconds(), ctx.Err()
	}
	if write, err = pass(f.WriteAt); err != nil {
		return 0, 0, err
	}
	read, err = pass(f.ReadAt)
	return write, read, err
}

// trySeals makes the kind of memory that the RAM tier is made of.
func trySeals() error {
	fd, err := unix.MemfdCreate("kvtier-probe", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return fmt.Errorf("memfd_create: %w", err)
	}
	defer unix.Close(fd) //nolint:errcheck // a probe
	_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_FUTURE_WRITE)
	return err
}

// meminfo is a line of /proc/meminfo in bytes (or a plain count).
func (h *host) meminfo(name string) (int64, error) {
	f, err := h.files.Open("proc/meminfo")
	if err != nil {
		return 0, err
	}
	defer f.Close() //nolint:errcheck // only read
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		rest, ok := strings.CutPrefix(lines.Text(), name+":")
		if !ok {
			continue
		}
		fields := strings.Fields(rest)
		if len(fields) == 0 {
			break
		}
		n, err := strconv.ParseInt(fields[0], 10, 64)
		if len(fields) == 2 {
			n *= 1024
		}
		return n, err
	}
	return 0, fmt.Errorf("/proc/meminfo has no %s", name)
}

// freeMemory is how many bytes the machine and the control group can still give.
func (h *host) freeMemory() (int64, error) {
	room, err := h.meminfo("MemAvailable")
	if left, _, limited := h.cgroupRoom(); limited && left < room {
		room = left
	}
	return room, err
}

// cgroupRoom is how much more memory the control group of this process may use,
// and where that limit is set. ok is false if there is none.
func (h *host) cgroupRoom() (room int64, where string, ok bool) {
	text, err := fs.ReadFile(h.files, "proc/self/cgroup")
	if err != nil {
		return 0, "", false
	}
	for line := range strings.Lines(string(text)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) != 3 {
			continue
		}
		switch {
		case parts[0] == "0":
			room, where, ok = h.tightest("sys/fs/cgroup", parts[2], "memory.max", "memory.current", room, where, ok)
		case strings.Contains(","+parts[1]+",", ",memory,"):
			room, where, ok = h.tightest("sys/fs/cgroup/memory", parts[2], "memory.limit_in_bytes", "memory.usage_in_bytes", room, where, ok)
		}
	}
	return room, where, ok
}

// tightest walks from a group up to the root: the smallest room counts.
func (h *host) tightest(root, group, limitFile, usedFile string, room int64, where string, ok bool) (int64, string, bool) {
	for dir := path.Clean("/" + group); ; dir = path.Dir(dir) {
		at := path.Join(root, dir)
		limit, err := h.number(path.Join(at, limitFile))
		if err == nil && limit < 1<<60 {
			used, _ := h.number(path.Join(at, usedFile))
			if left := limit - used; !ok || left < room {
				room, where, ok = left, "/"+path.Join(at, limitFile), true
			}
		}
		if dir == "/" {
			return room, where, ok
		}
	}
}

// number reads a file that holds one number. "max" is an error.
func (h *host) number(name string) (int64, error) {
	text, err := fs.ReadFile(h.files, name)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
}

// word reads a file that holds one line; "" if it cannot be read.
func (h *host) word(name string) string {
	text, err := fs.ReadFile(h.files, name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}

// dirBytes is what the files of a directory take, 0 if it does not exist.
func (h *host) dirBytes(dir string) (int64, error) {
	var sum int64
	err := fs.WalkDir(h.files, strings.TrimPrefix(path.Clean(dir), "/"), func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if info, err := d.Info(); err == nil && d.Type().IsRegular() {
			sum += info.Size()
		}
		return nil
	})
	return sum, err
}
