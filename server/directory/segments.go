package directory

import (
	"github.com/hashicorp/raft-wal/fs"
	"github.com/hashicorp/raft-wal/segment"
	"github.com/hashicorp/raft-wal/types"
)

// segments are the files of the log. The library seals a segment whose tail it
// truncates without writing the index by which sealed segments are read (raft-wal
// v0.4.0): after a restart the entries that were kept could not be read, and a node
// that had led and lost the lead could never start again. Such a segment is read
// like the unsealed one, whose index is made by reading through it.
type segments struct{ *segment.Filer }

func openSegments(dir string) segments { return segments{segment.NewFiler(dir, fs.New())} }

// Open implements types.SegmentFiler.
func (s segments) Open(info types.SegmentInfo) (types.SegmentReader, error) {
	if info.IndexStart == 0 {
		return s.RecoverTail(info)
	}
	return s.Filer.Open(info)
}
