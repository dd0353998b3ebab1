package nvme

import "io"

// volume is the directory of a tier, as the tier needs it: the seam at which
// tests inject faults and simulate crashes. Names are relative to the
// directory. Methods may be called at the same time.
type volume interface {
	// Lock takes the exclusive lock of the directory, among processes and
	// inside this one, or fails with ErrInUse. The file may be created.
	Lock(name string) (io.Closer, error)
	// List names the entries of a directory ("" is the root) with their sizes.
	// A directory that does not exist has none.
	List(dir string) ([]entry, error)
	// Mkdir creates a directory durably; it may exist.
	Mkdir(dir string) error
	// ReadFile returns the content of a small file.
	ReadFile(name string) ([]byte, error)
	// PutFile makes a small file with this content durable, all or nothing.
	PutFile(name string, content []byte) error
	// Create makes a file of this length whose space is allocated, for writing
	// past any cache. Neither the length nor the name is durable yet.
	Create(name string, bytes int64) (file, error)
	// Open opens an existing file for reading and writing past any cache.
	Open(name string) (file, error)
	// Rename durably gives oldname the name newname.
	Rename(oldname, newname string) error
	// Remove deletes a file. It need not be durable.
	Remove(name string) error
	// FreeBytes is the room left on the file system.
	FreeBytes() (int64, error)
	// Remark says in words what people should know about this directory, such
	// as that the file system takes no direct I/O; "" if nothing.
	Remark() string
}

// file is one open file. Offsets are multiples of paging.UnitBytes; lengths
// are any: the rest of the last unit reads as anything and is written as zeros.
type file interface {
	// ReadAt fills b.
	ReadAt(b []byte, offset int64) error
	// WriteAt writes bufs one behind the other, each from a unit boundary on.
	WriteAt(bufs [][]byte, offset int64) error
	// Sync makes what was written durable.
	Sync() error
	Bytes() int64
	Close() error
}

type entry struct {
	name  string
	bytes int64
	dir   bool
}
