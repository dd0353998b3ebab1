package nvme

import (
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"sync"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// memVolume is a volume in a vfs.FS, so that the segments and the index of a
// tier live in one file system that can be cloned as after a crash.
type memVolume struct {
	fs  vfs.FS
	dir string
	*faults

	open map[string]*memFile // by name, to follow renames; guarded by faults.mu
}

// faults are injected into segment files. Hooks get the name of the file and
// may block. All may be nil.
type faults struct {
	mu     sync.Mutex
	read   func(name string, b []byte, offset int64) error // after a good read: may change b
	before func(name string) error                         // before a read
	write  func(name string, offset int64) error
	sync   func(name string) error
	free   func() int64
}

func (f *faults) set(change func(*faults)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(f)
}

var locks = struct {
	mu   sync.Mutex
	held map[vfs.FS]bool
}{held: map[vfs.FS]bool{}}

type memLock struct{ fs vfs.FS }

func (l memLock) Close() error {
	locks.mu.Lock()
	defer locks.mu.Unlock()
	delete(locks.held, l.fs)
	return nil
}

func (v *memVolume) path(name string) string { return filepath.Join(v.dir, name) }

func (v *memVolume) Lock(name string) (io.Closer, error) {
	locks.mu.Lock()
	defer locks.mu.Unlock()
	if locks.held[v.fs] {
		return nil, ErrInUse
	}
	f, err := v.fs.OpenReadWrite(v.path(name), vfs.WriteCategoryUnspecified)
	if err != nil {
		return nil, err
	}
	locks.held[v.fs] = true
	return memLock{v.fs}, f.Close()
}

func (v *memVolume) List(dir string) ([]entry, error) {
	names, err := v.fs.List(v.path(dir))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	var entries []entry
	for _, name := range names {
		info, err := v.fs.Stat(v.fs.PathJoin(v.path(dir), name))
		if err != nil {
			return nil, err
		}
		entries = append(entries, entry{name: name, bytes: info.Size(), dir: info.IsDir()})
	}
	return entries, err
}

func (v *memVolume) syncDir(name string) error {
	parent := filepath.Dir(v.path(name))
	if parent == "." {
		parent = "/"
	}
	d, err := v.fs.OpenDir(parent)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func (v *memVolume) Mkdir(dir string) error {
	if err := v.fs.MkdirAll(v.path(dir), 0o700); err != nil {
		return err
	}
	return v.syncDir(dir)
}

func (v *memVolume) ReadFile(name string) ([]byte, error) {
	f, err := v.fs.Open(v.path(name))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(f)
}

func (v *memVolume) PutFile(name string, content []byte) error {
	f, err := v.fs.Create(v.path(name)+tmpSuffix, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return v.Rename(name+tmpSuffix, name)
}

func (v *memVolume) Create(name string, bytes int64) (file, error) {
	f, err := v.fs.Create(v.path(name), vfs.WriteCategoryUnspecified)
	if err != nil {
		return nil, err
	}
	if err := f.Close(); err != nil {
		return nil, err
	}
	return v.openFile(name, bytes)
}

func (v *memVolume) Open(name string) (file, error) {
	info, err := v.fs.Stat(v.path(name))
	if err != nil {
		return nil, err
	}
	return v.openFile(name, info.Size())
}

func (v *memVolume) openFile(name string, bytes int64) (file, error) {
	f, err := v.fs.OpenReadWrite(v.path(name), vfs.WriteCategoryUnspecified)
	if err != nil {
		return nil, err
	}
	m := &memFile{f: f, v: v, name: name, bytes: bytes}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.open == nil {
		v.open = map[string]*memFile{}
	}
	v.open[name] = m
	return m, nil
}

func (v *memVolume) Rename(oldname, newname string) error {
	if err := v.fs.Rename(v.path(oldname), v.path(newname)); err != nil {
		return err
	}
	v.mu.Lock()
	if m := v.open[oldname]; m != nil {
		delete(v.open, oldname)
		m.name, v.open[newname] = newname, m
	}
	v.mu.Unlock()
	return v.syncDir(newname)
}

func (v *memVolume) Remove(name string) error { return v.fs.Remove(v.path(name)) }

func (v *memVolume) FreeBytes() (int64, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.free != nil {
		return v.free(), nil
	}
	return math.MaxInt64, nil
}

func (v *memVolume) Remark() string { return "" }

type memFile struct {
	f     vfs.File
	v     *memVolume
	name  string
	bytes int64
}

func (m *memFile) ReadAt(b []byte, offset int64) error {
	m.v.mu.Lock()
	before, after, name := m.v.before, m.v.read, m.name
	m.v.mu.Unlock()
	if before != nil {
		if err := before(name); err != nil {
			return err
		}
	}
	n, err := m.f.ReadAt(b, offset)
	if n == len(b) {
		err = nil
	} else if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	if err == nil && after != nil {
		err = after(name, b, offset)
	}
	return err
}

func (m *memFile) WriteAt(bufs [][]byte, offset int64) error {
	m.v.mu.Lock()
	write, name := m.v.write, m.name
	m.v.mu.Unlock()
	if write != nil {
		if err := write(name, offset); err != nil {
			return err
		}
	}
	for _, b := range bufs {
		whole := make([]byte, roundUp(len(b)))
		copy(whole, b)
		if _, err := m.f.WriteAt(whole, offset); err != nil {
			return err
		}
		offset += int64(len(whole))
	}
	return nil
}

func (m *memFile) Sync() error {
	m.v.mu.Lock()
	hook, name := m.v.sync, m.name
	m.v.mu.Unlock()
	if hook != nil {
		if err := hook(name); err != nil {
			return err
		}
	}
	return m.f.SyncData()
}

func (m *memFile) Bytes() int64 { return m.bytes }

func (m *memFile) Close() error { return m.f.Close() }
