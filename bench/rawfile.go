package bench

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/paging"
)

// alignedMemory is n bytes that start at a page of the machine, as O_DIRECT
// wants it. The caller unmaps it.
func alignedMemory(n int64) ([]byte, error) {
	b, err := unix.Mmap(-1, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_POPULATE)
	if err != nil {
		return nil, fmt.Errorf("memory of %s: %w", FormatBytes(n), err)
	}
	return b, nil
}

// rawFile is the bound of the NVMe tier: one file that was written in full
// before, opened with O_DIRECT.
type rawFile struct {
	f *os.File
}

// newRawFile makes the file and writes it once, so that later writes convert no
// unwritten extents.
func newRawFile(path string, bytes int64, chunk []byte) (*rawFile, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR|unix.O_DIRECT, 0o600)
	if errors.Is(err, unix.EINVAL) {
		return nil, fmt.Errorf("%s: this file system does not take O_DIRECT, choose another by --temp-dir: %w", path, err)
	}
	if err != nil {
		return nil, err
	}
	for at := int64(0); at < bytes; at += int64(len(chunk)) {
		if _, err := f.WriteAt(chunk[:min(int64(len(chunk)), bytes-at)], at); err != nil {
			return nil, errors.Join(err, f.Close())
		}
	}
	return &rawFile{f}, f.Sync()
}

// write stores src at an offset in pieces of page bytes, with so many writers at
// a time, and syncs.
func (r *rawFile) write(src []byte, at int64, page, writers int) error {
	err := parallel(writers, len(src)/page, func(_, i int) error {
		_, err := r.f.WriteAt(src[i*page:][:page], at+int64(i*page))
		return err
	})
	return errors.Join(err, unix.Fdatasync(int(r.f.Fd())))
}

// parallel runs do for 0 to n-1 on so many goroutines, each taking a run of
// consecutive numbers, and waits for all.
func parallel(workers, n int, do func(worker, i int) error) error {
	errs := make([]error, workers)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() { // owner: parallel; ends with its share
			for i := w * n / workers; i < (w+1)*n/workers && errs[w] == nil; i++ {
				errs[w] = do(w, i)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// dropCaches asks the kernel to forget the pages of every file under dir and
// returns how many bytes it still holds; -1 if the kernel does not tell.
func dropCaches(dir string) (cached int64, err error) {
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		n, err := dropFile(f)
		if cached >= 0 {
			cached += n
		}
		if n < 0 {
			cached = -1
		}
		return err
	})
	return cached, err
}

func dropFile(f *os.File) (int64, error) {
	fd := int(f.Fd())
	if err := unix.Fdatasync(fd); err != nil && !errors.Is(err, unix.EINVAL) {
		return 0, err
	}
	if err := unix.Fadvise(fd, 0, 0, unix.FADV_DONTNEED); err != nil {
		return 0, fmt.Errorf("drop the page cache of %s: %w", f.Name(), err)
	}
	var stat unix.Cachestat_t
	if err := unix.Cachestat(uint(fd), &unix.CachestatRange{}, &stat, 0); err != nil {
		return -1, nil //nolint:nilerr // Linux before 6.5 does not tell
	}
	return int64(stat.Cache) * paging.UnitBytes, nil
}

// diskBytes is the space that the files under dir take on disk.
func diskBytes(dir string) (sum int64, err error) {
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			return err
		}
		sum += st.Blocks * 512
		return nil
	})
	return sum, err
}

// writtenBytes is what this process has sent to disks so far.
func writtenBytes() (int64, error) {
	text, err := os.ReadFile("/proc/self/io")
	if err != nil {
		return 0, err
	}
	var n int64
	for line := range lines(text) {
		if _, err := fmt.Sscanf(line, "write_bytes: %d", &n); err == nil {
			return n, nil
		}
	}
	return 0, errors.New("/proc/self/io has no write_bytes")
}
