package directory

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/hashicorp/raft"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/placement"
)

// maxBackupBytes bounds a snapshot that is restored: some 300 M claims.
const maxBackupBytes = 8 << 30

// SaveSnapshot writes the state of this replica, as of the last command that it
// applied, for RestoreSnapshot and InspectSnapshot. Commands are applied
// meanwhile. A replica that is behind saves an older state.
func (d *Directory) SaveSnapshot(w io.Writer) error {
	snap, err := d.now.Load().fsm.backup()
	if err != nil {
		return err
	}
	buffered := bufio.NewWriterSize(w, snapshotBuffer)
	if err := snap.Write(buffered); err != nil {
		return err
	}
	return buffered.Flush()
}

// backup is a snapshot that tells its place in the log.
func (f *fsm) backup() (*Snapshot, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.mu.err != nil {
		return nil, f.mu.err
	}
	snap := f.mu.state.Snapshot()
	snap.header.LogIndex, snap.header.LogTerm = f.mu.index, f.mu.term
	return snap, nil
}

// RestoreSnapshot replaces the state of the whole cluster by a saved one: this
// node has to lead, and commits it. The replicas and voters stay those of the
// cluster. Commands that wait meanwhile are proposed again by those who wait.
// Nodes make themselves known again and repair their claims, so what the snapshot
// is behind is made good from the inventories. Nothing changes unless the
// snapshot is whole. Errors: paging.ErrCorrupt, ErrIncompatible, ErrNoSpace for a
// snapshot with more claims than MaxClaims, ErrUnavailable unless this node leads
// and a quorum takes part.
func (d *Directory) RestoreSnapshot(ctx context.Context, r io.Reader) error {
	if why := d.Stalled(); why != "" {
		return fmt.Errorf("%s: %w", why, paging.ErrUnavailable)
	}
	now := d.now.Load()
	if now.raft.State() != raft.Leader {
		return fmt.Errorf("this node does not lead the directory: %w", paging.ErrUnavailable)
	}
	f, size, err := d.spool(ctx, r)
	if err != nil {
		return err
	}
	defer f.Close()
	within := defaultProposing
	if deadline, has := ctx.Deadline(); has {
		within = time.Until(deadline)
	}
	if !now.begin() {
		return fmt.Errorf("directory: %w", paging.ErrClosed)
	}
	defer now.end()
	start := time.Now()
	if err := now.raft.Barrier(within).Error(); err != nil { // a leader that is new has entries to apply: the library refuses until then
		return raftError(err)
	}
	within = max(within-time.Since(start), time.Millisecond) // to the library 0 is no bound
	if err := now.raft.Restore(&raft.SnapshotMeta{Version: raft.SnapshotVersionMax, Size: size}, f, within); err != nil {
		return raftError(err)
	}
	d.log.Warn("directory restored from a snapshot", "bytes", size)
	return nil
}

// spool copies a snapshot to a file that has no name, checks it as a whole and
// leaves the file at its beginning. The caller closes it.
func (d *Directory) spool(ctx context.Context, r io.Reader) (_ *os.File, size int64, err error) {
	f, err := os.CreateTemp(d.cfg.Dir, "restore-*")
	if err != nil {
		return nil, 0, fmt.Errorf("restore directory: %w", err)
	}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	if err := os.Remove(f.Name()); err != nil {
		return nil, 0, fmt.Errorf("restore directory: %w", err)
	}
	size, err = io.Copy(f, io.LimitReader(untilDone{ctx, r}, maxBackupBytes+1))
	if err != nil {
		return nil, 0, fmt.Errorf("restore directory: %w", err)
	}
	if size > maxBackupBytes {
		return nil, 0, fmt.Errorf("directory snapshot of more than %d bytes: %w", int64(maxBackupBytes), paging.ErrInvalid)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, 0, err
	}
	in := bufio.NewReaderSize(untilDone{ctx, f}, snapshotBuffer)
	s, err := Restore(in, d.cfg.MaxClaims)
	if err != nil {
		return nil, 0, err
	}
	if s.Claims() > d.cfg.MaxClaims {
		return nil, 0, fmt.Errorf("directory snapshot with %d claims, the budget is %d: %w", s.Claims(), d.cfg.MaxClaims, paging.ErrNoSpace)
	}
	if _, err := in.ReadByte(); !errors.Is(err, io.EOF) {
		return nil, 0, fmt.Errorf("directory snapshot goes on after its end: %w", paging.ErrCorrupt)
	}
	_, err = f.Seek(0, io.SeekStart)
	return f, size, err
}

// untilDone is a reader that ends with a context.
type untilDone struct {
	ctx context.Context // of the one call that reads
	r   io.Reader
}

func (u untilDone) Read(p []byte) (int, error) {
	if err := u.ctx.Err(); err != nil {
		return 0, err
	}
	return u.r.Read(p)
}

// Summary is what a snapshot holds.
type Summary struct {
	Version    uint32
	Time       time.Time // of the state machine's clock
	Applied    uint64    // commands
	LogIndex   uint64    // last entry of the log that it holds; 0: it does not say
	LogTerm    uint64
	Nodes      []NodeSummary // in order of their numbers
	Namespaces []NamespaceSummary
	Claims     int64
	Sessions   int64
	Plans      int64 // that run or are remembered
	Audit      int64 // records of the audit trail
	Requests   int64 // ids of commands that are remembered
	Bytes      int64
}

// NodeSummary is a node in a Summary.
type NodeSummary struct {
	ID          placement.NodeID
	Incarnation placement.Incarnation
	Name        string
	PeerAddress string
	State       kvtierv1.NodeState
	Gap         bool
	Claims      int64

	number uint16
}

// NamespaceSummary is a namespace in a Summary.
type NamespaceSummary struct {
	ID     paging.NamespaceID
	Tenant string
	Model  string
}

// InspectSnapshot reads a snapshot from its beginning to its end and tells what
// it holds, in memory that does not grow with the claims. With an error it tells
// what it has found until then: paging.ErrCorrupt for one that is damaged, cut or
// goes on after its end, ErrIncompatible for one of another version.
func InspectSnapshot(r io.Reader) (*Summary, error) {
	counted := &countingReader{r: bufio.NewReaderSize(r, snapshotBuffer)}
	in := &inspection{claims: make(map[uint16]int64)}
	err := readRecords(counted, in.visit)
	if err == nil {
		var more [1]byte
		if n, end := counted.r.Read(more[:]); n > 0 || !errors.Is(end, io.EOF) {
			err = fmt.Errorf("directory snapshot goes on after its end: %w", paging.ErrCorrupt)
		}
	}
	in.Bytes = counted.n
	for i := range in.Nodes {
		n := &in.Nodes[i]
		n.Claims = in.claims[n.number]
		delete(in.claims, n.number)
	}
	if err == nil && len(in.claims) > 0 {
		err = fmt.Errorf("directory snapshot has claims of nodes that are not in it: %w", paging.ErrCorrupt)
	}
	return &in.Summary, err
}

type countingReader struct {
	r *bufio.Reader
	n int64
}

func (c *countingReader) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	return n, err
}

type inspection struct {
	Summary
	claims map[uint16]int64 // by number of the node
}

func (in *inspection) visit(_ int, record *kvtierv1.DirectoryRecord) error {
	switch r := record.GetRecord().(type) {
	case *kvtierv1.DirectoryRecord_Header:
		h := r.Header
		in.Version, in.Applied, in.LogIndex, in.LogTerm = h.GetVersion(), h.GetApplied(), h.GetLogIndex(), h.GetLogTerm()
		in.Time = time.UnixMilli(h.GetNowUnixMs())
		return nil
	case *kvtierv1.DirectoryRecord_Node:
		j := r.Node.GetJoined()
		id, ok := toNodeID(j.GetNode())
		if !ok || len(in.Nodes) >= maxNodes {
			return fmt.Errorf("node record: %w", paging.ErrCorrupt)
		}
		in.Nodes = append(in.Nodes, NodeSummary{
			ID: id, Incarnation: placement.Incarnation(j.GetIncarnation()), Name: j.GetName(), PeerAddress: j.GetPeerAddress(),
			State: r.Node.GetState(), Gap: r.Node.GetGap(), number: uint16(r.Node.GetNumber()),
		})
		return nil
	case *kvtierv1.DirectoryRecord_Namespace:
		ns, err := paging.DecodeNamespace(r.Namespace.GetNamespace())
		if err != nil {
			return err
		}
		if len(in.Namespaces) >= maxNamespaces {
			return fmt.Errorf("more than %d namespaces: %w", maxNamespaces, paging.ErrCorrupt)
		}
		in.Namespaces = append(in.Namespaces, NamespaceSummary{ID: ns.ID(), Tenant: ns.Tenant, Model: ns.Layout.Model})
		return nil
	case *kvtierv1.DirectoryRecord_Requests:
		in.Requests += int64(len(r.Requests.GetResults()))
		return nil
	case *kvtierv1.DirectoryRecord_Claims:
		b := r.Claims.GetClaims()
		if len(b)%claimRecordBytes != 0 {
			return fmt.Errorf("claims record: %w", paging.ErrCorrupt)
		}
		for ; len(b) > 0; b = b[claimRecordBytes:] {
			in.claims[binary.LittleEndian.Uint16(b[changeBytes:])]++
			in.Claims++
		}
		return nil
	case *kvtierv1.DirectoryRecord_Session:
		in.Sessions++
		return nil
	case *kvtierv1.DirectoryRecord_Plan:
		in.Plans++
		return nil
	case *kvtierv1.DirectoryRecord_Audit:
		in.Audit += int64(len(r.Audit.GetRecords()))
		return nil
	}
	return fmt.Errorf("record of a kind that this version does not know: upgrade this program: %w", paging.ErrIncompatible)
}
