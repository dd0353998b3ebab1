package bench

import (
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
)

// damageLeast tells segment files from the manifest beside them: only page bytes
// are damaged, the manifest has checksums of its own.
const damageLeast = 1 << 20

// flipBits flips count bits at random places of the segment files under dir and
// returns how many it flipped: none if there is no such file.
func flipBits(dir string, count int, rng *rand.Rand) (int, error) {
	if count == 0 {
		return 0, nil
	}
	var files []string
	var sizes []int64
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err == nil && d.Type().IsRegular() && info.Size() >= damageLeast {
			files, sizes = append(files, path), append(sizes, info.Size())
		}
		return err
	})
	if err != nil || len(files) == 0 {
		return 0, err
	}
	for range count {
		i := rng.IntN(len(files))
		if err := flipBit(files[i], rng.Int64N(sizes[i]*8)); err != nil {
			return 0, fmt.Errorf("damage %s: %w", files[i], err)
		}
	}
	return count, nil
}

func flipBit(file string, bit int64) error {
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	var b [1]byte
	if _, err := f.ReadAt(b[:], bit/8); err != nil {
		return err
	}
	b[0] ^= 1 << (bit % 8)
	_, err = f.WriteAt(b[:], bit/8)
	return err
}
