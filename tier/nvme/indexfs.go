package nvme

import (
	"errors"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"golang.org/x/sys/unix"
)

// indexFS stands between Pebble and the file system of the index, for three
// reasons. Pebble gives up for good when its log or manifest cannot be
// written; so a write that finds the disk full waits here until there is room
// again, and the tier is in bypass meanwhile. An instance that did give up
// cannot be closed: fence cuts it off the files before another one opens them.
// And it counts the bytes written.
//
// The lock of Pebble is left out: the directory has one of its own.
type indexFS struct {
	vfs.FS
	fenced  chan struct{} // closed: nothing is written through here any more
	patient atomic.Bool   // after Open: before, a full disk is an error
	fence1  sync.Once
	stalled atomic.Int32 // writes that wait for room
	stall   func()       // called when a write begins to wait
	written *atomic.Int64
	syncs   *atomic.Int64
}

// errFenced is what a cut-off Pebble sees.
var errFenced = errors.New("index closed")

func (fs *indexFS) fence() { fs.fence1.Do(func() { close(fs.fenced) }) }

func (fs *indexFS) isFenced() bool {
	select {
	case <-fs.fenced:
		return true
	default:
		return false
	}
}

// Waits of a write that finds the disk full.
const (
	firstRoomWait = 20 * time.Millisecond
	lastRoomWait  = time.Second
)

// park keeps a goroutine of a Pebble that is given up for good. It must not go
// on: Pebble would report success for a write that failed, or repeat a flush
// for ever. Nor may it end: Pebble's deferred unlocks do not hold everywhere,
// and to unlock an unlocked mutex ends the process. So it stays, with what it
// has locked; maxReopens bounds how often.
func park() { select {} }

// write runs op, which changes files, and repeats it while the disk is full.
// Once fenced it does not return.
func (fs *indexFS) write(op func() error) error {
	wait := firstRoomWait
	waiting := false
	for {
		if fs.isFenced() {
			if waiting {
				fs.stalled.Add(-1)
			}
			park()
		}
		err := op()
		if err == nil || !isDiskFull(err) || !fs.patient.Load() {
			if waiting {
				fs.stalled.Add(-1)
			}
			return err
		}
		if !waiting {
			waiting = true
			fs.stalled.Add(1)
			fs.stall()
		}
		select {
		case <-time.After(wait):
		case <-fs.fenced:
		}
		wait = min(2*wait, lastRoomWait)
	}
}

func isDiskFull(err error) bool {
	return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT)
}

func (fs *indexFS) wrap(f vfs.File, err error) (vfs.File, error) {
	if err != nil {
		return nil, err
	}
	return &indexFile{File: f, fs: fs}, nil
}

func (fs *indexFS) Create(name string, category vfs.DiskWriteCategory) (f vfs.File, err error) {
	err = fs.write(func() error {
		f, err = fs.FS.Create(name, category)
		return err
	})
	return fs.wrap(f, err)
}

func (fs *indexFS) OpenReadWrite(name string, category vfs.DiskWriteCategory, opts ...vfs.OpenOption) (f vfs.File, err error) {
	err = fs.write(func() error {
		f, err = fs.FS.OpenReadWrite(name, category, opts...)
		return err
	})
	return fs.wrap(f, err)
}

func (fs *indexFS) ReuseForWrite(oldname, newname string, category vfs.DiskWriteCategory) (f vfs.File, err error) {
	err = fs.write(func() error {
		f, err = fs.FS.ReuseForWrite(oldname, newname, category)
		return err
	})
	return fs.wrap(f, err)
}

func (fs *indexFS) OpenDir(name string) (f vfs.File, err error) {
	return fs.wrap(fs.FS.OpenDir(name))
}

func (fs *indexFS) Link(oldname, newname string) error {
	return fs.write(func() error { return fs.FS.Link(oldname, newname) })
}

func (fs *indexFS) Remove(name string) error {
	return fs.write(func() error { return fs.FS.Remove(name) })
}

func (fs *indexFS) RemoveAll(name string) error {
	return fs.write(func() error { return fs.FS.RemoveAll(name) })
}

func (fs *indexFS) Rename(oldname, newname string) error {
	return fs.write(func() error { return fs.FS.Rename(oldname, newname) })
}

func (fs *indexFS) MkdirAll(dir string, perm os.FileMode) error {
	return fs.write(func() error { return fs.FS.MkdirAll(dir, perm) })
}

func (fs *indexFS) Lock(string) (io.Closer, error) { return noLock{}, nil }

func (fs *indexFS) Unwrap() vfs.FS { return fs.FS }

type noLock struct{}

func (noLock) Close() error { return nil }

// indexFile is a file opened for writing, or a directory.
type indexFile struct {
	vfs.File
	fs *indexFS
}

func (f *indexFile) Write(p []byte) (int, error) {
	done := 0
	err := f.fs.write(func() error {
		n, err := f.File.Write(p[done:])
		done += n
		f.fs.written.Add(int64(n))
		return err
	})
	return done, err
}

func (f *indexFile) WriteAt(p []byte, ofs int64) (int, error) {
	done := 0
	err := f.fs.write(func() error {
		n, err := f.File.WriteAt(p[done:], ofs+int64(done))
		done += n
		f.fs.written.Add(int64(n))
		return err
	})
	return done, err
}

func (f *indexFile) Preallocate(offset, length int64) error {
	// Only a hint: a full disk shows at the write.
	if err := f.File.Preallocate(offset, length); err != nil && !isDiskFull(err) {
		return err
	}
	return nil
}

func (f *indexFile) Sync() error {
	f.fs.syncs.Add(1)
	return f.fs.write(f.File.Sync)
}

func (f *indexFile) SyncData() error {
	f.fs.syncs.Add(1)
	return f.fs.write(f.File.SyncData)
}

func (f *indexFile) SyncTo(length int64) (full bool, err error) {
	err = f.fs.write(func() error {
		full, err = f.File.SyncTo(length)
		return err
	})
	return full, err
}
