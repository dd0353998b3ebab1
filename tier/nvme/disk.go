package nvme

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/paging"
)

// diskVolume is a directory of a real file system. Files are opened with
// O_DIRECT where that works, else buffered, and then the page cache is told to
// forget what was read and written.
type diskVolume struct {
	dir      string
	direct   bool
	bounces  *bouncePool
	buffered atomic.Bool // some file was opened without O_DIRECT
}

func (v *diskVolume) path(name string) string { return filepath.Join(v.dir, name) }

func (v *diskVolume) Lock(name string) (io.Closer, error) {
	f, err := os.OpenFile(v.path(name), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("%s is locked: %w", f.Name(), ErrInUse)
		}
		return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return f, nil
}

func (v *diskVolume) List(dir string) ([]entry, error) {
	found, err := os.ReadDir(v.path(dir))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	entries := make([]entry, 0, len(found))
	for _, d := range found {
		info, err := d.Info()
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		entries = append(entries, entry{name: d.Name(), bytes: info.Size(), dir: d.IsDir()})
	}
	return entries, nil
}

func (v *diskVolume) Mkdir(dir string) error {
	if err := os.MkdirAll(v.path(dir), 0o700); err != nil {
		return err
	}
	return syncDir(filepath.Dir(v.path(dir)))
}

func (v *diskVolume) ReadFile(name string) ([]byte, error) { return os.ReadFile(v.path(name)) }

func (v *diskVolume) PutFile(name string, content []byte) error {
	tmp := v.path(name) + tmpSuffix
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err == nil {
		err = f.Sync()
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	return v.Rename(name+tmpSuffix, name)
}

func (v *diskVolume) Create(name string, bytes int64) (file, error) {
	f, err := v.open(name, os.O_CREATE|os.O_TRUNC)
	if err != nil {
		return nil, err
	}
	err = unix.Fallocate(f.fd, 0, 0, bytes)
	if errors.Is(err, unix.EOPNOTSUPP) {
		err = f.os.Truncate(bytes)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("allocate %s: %w", name, err), f.Close(), v.Remove(name))
	}
	f.bytes = bytes
	return f, nil
}

func (v *diskVolume) Open(name string) (file, error) {
	f, err := v.open(name, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.os.Stat()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	f.bytes = info.Size()
	return f, nil
}

func (v *diskVolume) open(name string, flags int) (*diskFile, error) {
	direct := v.direct
	flags |= os.O_RDWR
	var f *os.File
	var err error
	if direct {
		f, err = os.OpenFile(v.path(name), flags|unix.O_DIRECT, 0o600)
	}
	if !direct || errors.Is(err, unix.EINVAL) {
		direct = false
		v.buffered.Store(true)
		f, err = os.OpenFile(v.path(name), flags, 0o600)
	}
	if err != nil {
		return nil, err
	}
	return &diskFile{os: f, fd: int(f.Fd()), direct: direct, bounces: v.bounces}, nil
}

func (v *diskVolume) Rename(oldname, newname string) error {
	if err := os.Rename(v.path(oldname), v.path(newname)); err != nil {
		return err
	}
	return syncDir(filepath.Dir(v.path(newname)))
}

func (v *diskVolume) Remove(name string) error { return os.Remove(v.path(name)) }

func (v *diskVolume) FreeBytes() (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(v.dir, &st); err != nil {
		return 0, err
	}
	return int64(st.Bavail) * st.Frsize, nil //nolint:gosec // a file system has less than 2^63 blocks
}

func (v *diskVolume) Remark() string {
	if v.buffered.Load() {
		return "buffered I/O: the file system takes no O_DIRECT"
	}
	return ""
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// diskFile does I/O by descriptor: pread and pwrite of vectors.
type diskFile struct {
	os      *os.File
	fd      int
	bytes   int64
	direct  bool
	bounces *bouncePool
}

func (f *diskFile) Bytes() int64 { return f.bytes }

func (f *diskFile) Close() error { return f.os.Close() }

func (f *diskFile) Sync() error {
	err := unix.Fdatasync(f.fd)
	for err == unix.EINTR {
		err = unix.Fdatasync(f.fd)
	}
	if err == nil && !f.direct {
		return unix.Fadvise(f.fd, 0, 0, unix.FADV_DONTNEED)
	}
	return err
}

func (f *diskFile) ReadAt(b []byte, offset int64) error {
	whole := len(b) &^ (paging.UnitBytes - 1)
	if !f.direct {
		if err := f.transfer(unix.Preadv, [][]byte{b}, offset); err != nil {
			return err
		}
		return unix.Fadvise(f.fd, offset, int64(roundUp(len(b))), unix.FADV_DONTNEED)
	}
	bufs := [][]byte{b[:whole:whole]}
	if whole < len(b) {
		tail := f.bounces.get()
		defer f.bounces.put(tail)
		bufs = append(bufs, tail[:paging.UnitBytes])
		if whole == 0 {
			bufs = bufs[1:]
		}
	}
	err := f.transfer(unix.Preadv, bufs, offset)
	if err == unix.EINVAL { //nolint:errorlint // a bare errno
		return f.readBounced(b, offset)
	}
	if err == nil && whole < len(b) {
		copy(b[whole:], bufs[len(bufs)-1])
	}
	return err
}

// readBounced reads into memory that the device cannot address: not aligned.
func (f *diskFile) readBounced(b []byte, offset int64) error {
	f.bounces.reads.Add(1)
	bounce := f.bounces.get()
	defer f.bounces.put(bounce)
	for len(b) > 0 {
		n := min(len(b), len(bounce))
		if err := f.transfer(unix.Preadv, [][]byte{bounce[:roundUp(n)]}, offset); err != nil {
			return err
		}
		copy(b, bounce[:n])
		b, offset = b[n:], offset+int64(n)
	}
	return nil
}

func (f *diskFile) WriteAt(bufs [][]byte, offset int64) error {
	vec := make([][]byte, 0, len(bufs)+1)
	for _, b := range bufs {
		whole := len(b) &^ (paging.UnitBytes - 1)
		if whole > 0 {
			vec = append(vec, b[:whole:whole])
		}
		if whole < len(b) {
			tail := f.bounces.get()
			defer f.bounces.put(tail)
			clear(tail[copy(tail, b[whole:]):paging.UnitBytes])
			vec = append(vec, tail[:paging.UnitBytes])
		}
	}
	err := f.transfer(unix.Pwritev, vec, offset)
	if err == unix.EINVAL { //nolint:errorlint // a bare errno
		return f.writeBounced(bufs, offset)
	}
	return err
}

// writeBounced writes from memory that the device cannot address.
func (f *diskFile) writeBounced(bufs [][]byte, offset int64) error {
	bounce := f.bounces.get()
	defer f.bounces.put(bounce)
	for _, b := range bufs {
		f.bounces.writes.Add(1)
		for len(b) > 0 {
			n := copy(bounce, b)
			rounded := roundUp(n)
			clear(bounce[n:rounded])
			if err := f.transfer(unix.Pwritev, [][]byte{bounce[:rounded]}, offset); err != nil {
				return err
			}
			b, offset = b[n:], offset+int64(rounded)
		}
	}
	return nil
}

// maxVector is how many buffers one call takes (IOV_MAX).
const maxVector = 1024

// transfer moves all of vec, which it consumes.
func (f *diskFile) transfer(call func(fd int, iovs [][]byte, offset int64) (int, error), vec [][]byte, offset int64) error {
	for len(vec) > 0 {
		n, err := call(f.fd, vec[:min(len(vec), maxVector)], offset)
		if err == unix.EINTR || err == unix.EAGAIN { //nolint:errorlint // a bare errno
			continue
		}
		if err != nil {
			return err
		}
		if n == 0 {
			return io.ErrUnexpectedEOF
		}
		offset += int64(n)
		for n > 0 && n >= len(vec[0]) {
			n -= len(vec[0])
			vec = vec[1:]
		}
		if n > 0 {
			vec[0] = vec[0][n:]
		}
	}
	return nil
}

func roundUp(n int) int { return (n + paging.UnitBytes - 1) &^ (paging.UnitBytes - 1) }
