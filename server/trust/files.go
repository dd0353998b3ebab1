package trust

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/kvtier/kvtier/paging"
)

const fileMode = 0o600

// File is one to be written.
type File struct {
	Path  string
	Bytes []byte
}

// WriteFiles writes files that only their owner may read, each whole or not at
// all, in order: a key before its certificate, so that whoever waits for the
// certificate finds both. Unless replace is set nothing is written if one of them
// exists, with an error that is fs.ErrExist.
func WriteFiles(files []File, replace bool) error {
	if !replace {
		for _, f := range files {
			if _, err := os.Lstat(f.Path); err == nil {
				return fmt.Errorf("%s: %w", f.Path, fs.ErrExist)
			} else if !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
	}
	for _, f := range files {
		if err := writeFile(f, replace); err != nil {
			return err
		}
	}
	return nil
}

func writeFile(f File, replace bool) (err error) {
	tmp, err := os.CreateTemp(filepath.Dir(f.Path), "."+filepath.Base(f.Path)+".*") // mode 0600
	if err != nil {
		return err
	}
	defer func() { os.Remove(tmp.Name()) }() // gone already if it was renamed
	_, err = tmp.Write(f.Bytes)
	if err = errors.Join(err, tmp.Chmod(fileMode), tmp.Sync(), tmp.Close()); err != nil {
		return err
	}
	if replace {
		return os.Rename(tmp.Name(), f.Path)
	}
	// A link fails where a rename would replace what somebody wrote meanwhile.
	return os.Link(tmp.Name(), f.Path)
}

// ReadAuthority reads the files of an authority.
func ReadAuthority(certPath, keyPath string) (*Authority, error) {
	cert, err := readSmall(certPath)
	if err != nil {
		return nil, err
	}
	key, err := readSmall(keyPath)
	if err != nil {
		return nil, err
	}
	a, err := LoadAuthority(cert, key)
	if err != nil {
		return nil, fmt.Errorf("authority %s and %s: %w", certPath, keyPath, err)
	}
	return a, nil
}

// readSecret reads a file and refuses one that others may read: paging.ErrInvalid.
func readSecret(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("%s can be read by others (%v): chmod 600: %w", path, info.Mode().Perm(), paging.ErrInvalid)
	}
	return readSmall(path)
}
