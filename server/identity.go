package server

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/rpc"
)

// Names inside the data directory.
const (
	identityFile = "node.json"
	nvmeDir      = "nvme"
	clusterFile  = "cluster.json"
	directoryDir = "directory"
	sessionsDir  = "sessions"
)

const identityFormat = 1

// identity is who this node is: kept over restarts of one data directory.
type identity struct {
	node        rpc.ID
	incarnation uint64
}

// identityRecord is the content of identityFile (docs/formats.md).
type identityRecord struct {
	Format      int    `json:"format"`
	Node        string `json:"node"`
	Incarnation uint64 `json:"incarnation"`
}

func randomID() rpc.ID {
	var id rpc.ID
	_, _ = rand.Read(id[:]) // never fails: crypto/rand aborts the process instead
	return id
}

// dataDir is a data directory that this process alone uses.
type dataDir struct {
	path     string
	lock     *os.File
	identity identity
}

// openDir takes the data directory: it creates it, refuses one that holds
// something else untouched, and locks it against a second node. An empty path is
// a node without a directory.
func openDir(path string) (*dataDir, error) {
	if path == "" {
		return &dataDir{identity: identity{node: randomID(), incarnation: 1}}, nil
	}
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("data directory: %w", err)
	}
	if err := inspectDir(path); err != nil {
		return nil, err
	}
	lock, err := lockDir(path)
	if err != nil {
		return nil, err
	}
	return &dataDir{path: path, lock: lock}, nil
}

// raise begins the next incarnation of the node. It is called when all that the
// directory holds was found to be of a known format: one that is not stays as it is.
func (d *dataDir) raise() (err error) {
	if d.path != "" {
		d.identity, err = raiseIncarnation(d.path)
	}
	return err
}

// sub is a directory inside it.
func (d *dataDir) sub(name string) string { return filepath.Join(d.path, name) }

// holds reports whether there is something of that name inside it.
func (d *dataDir) holds(name string) bool {
	_, err := os.Lstat(d.sub(name))
	return !errors.Is(err, fs.ErrNotExist)
}

func (d *dataDir) close() {
	if d.lock != nil {
		d.lock.Close()
	}
}

// inspectDir refuses a directory that holds anything but a node's files.
func inspectDir(path string) error {
	entries, err := os.ReadDir(path)
	if err != nil {
		return fmt.Errorf("data directory: %w", err)
	}
	for _, e := range entries {
		switch e.Name() {
		case identityFile, identityFile + ".tmp", nvmeDir, clusterFile, clusterFile + ".tmp", directoryDir, sessionsDir, "lost+found":
		default:
			return fmt.Errorf("data directory %s holds %s, which is not kvtier's: name an empty directory: %w", path, e.Name(), paging.ErrIncompatible)
		}
	}
	_, err = readIdentity(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// lockDir locks a directory without a file of its own: one that is found to be
// somebody else's afterwards is as it was.
func lockDir(path string) (*os.File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	return lockFile(f)
}

// lockPath takes an exclusive lock that ends with the process.
func lockPath(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	return lockFile(f)
}

// lockFile locks f, which it closes on an error.
func lockFile(f *os.File) (*os.File, error) {
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("%s is locked: another node uses it: %w", f.Name(), paging.ErrUnavailable)
		}
		return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return f, nil
}

func readIdentity(dir string) (identity, error) {
	path := filepath.Join(dir, identityFile)
	b, err := os.ReadFile(path)
	if err != nil {
		return identity{}, err
	}
	var r identityRecord
	if err := json.Unmarshal(b, &r); err != nil {
		return identity{}, fmt.Errorf("%s is no identity of a node (%w): restore it, or name an empty directory: %w", path, err, paging.ErrIncompatible)
	}
	if r.Format != identityFormat {
		return identity{}, fmt.Errorf("%s has format %d, this version reads %d: %w", path, r.Format, identityFormat, paging.ErrIncompatible)
	}
	node, err := hex.DecodeString(r.Node)
	if err != nil || len(node) != len(rpc.ID{}) {
		return identity{}, fmt.Errorf("%s: node %q is not 16 bytes in hex: %w", path, r.Node, paging.ErrIncompatible)
	}
	return identity{node: rpc.ID(node), incarnation: r.Incarnation}, nil
}

// raiseIncarnation writes the next incarnation durably before it is used, so
// that no two starts share one.
func raiseIncarnation(dir string) (identity, error) {
	id, err := readIdentity(dir)
	if errors.Is(err, fs.ErrNotExist) {
		id = identity{node: randomID()}
	} else if err != nil {
		return identity{}, err
	}
	id.incarnation++
	b, err := json.Marshal(identityRecord{Format: identityFormat, Node: hex.EncodeToString(id.node[:]), Incarnation: id.incarnation})
	if err != nil {
		return identity{}, err
	}
	if err := writeFileDurably(filepath.Join(dir, identityFile), append(b, '\n')); err != nil {
		return identity{}, fmt.Errorf("write identity: %w", err)
	}
	return id, nil
}

// writeFileDurably replaces path by a file with these bytes, or leaves it as it was.
func writeFileDurably(path string, b []byte) error {
	tmp := path + ".tmp"
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		os.Remove(tmp)
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
