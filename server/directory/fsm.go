package directory

import (
	"bufio"
	"fmt"
	"io"
	"sync"

	"github.com/hashicorp/raft"
	"google.golang.org/protobuf/proto"

	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// fsm lets Raft drive a State, and readers look at it between two commands.
type fsm struct {
	maxClaims int64
	broken    func(error) // told once why this replica cannot go on
	replaced  func()      // told that the state is another: it came from a snapshot
	feed      *SessionFeed

	mu struct {
		sync.RWMutex
		state *State
		err   error // set when a command could not be applied: nothing is applied after it
		// The last entry applied. 0: none since the state came from a snapshot.
		index, term uint64
	}
}

func newFSM(maxClaims int64, broken func(error), replaced func(), feed *SessionFeed) *fsm {
	f := &fsm{maxClaims: maxClaims, broken: broken, replaced: replaced, feed: feed}
	f.mu.state = NewState(maxClaims)
	return f
}

// Apply implements raft.FSM.
func (f *fsm) Apply(l *raft.Log) any { return f.apply(l) }

// ApplyBatch implements raft.BatchingFSM. Readers get in between any two entries.
func (f *fsm) ApplyBatch(logs []*raft.Log) []any {
	out := make([]any, len(logs))
	for i, l := range logs {
		out[i] = f.apply(l)
	}
	return out
}

func (f *fsm) apply(l *raft.Log) any {
	if l.Type != raft.LogCommand {
		return nil
	}
	var c kvtierv1.DirectoryCommand
	err := proto.Unmarshal(l.Data, &c)
	var r Result
	var touched []string
	f.mu.Lock()
	first := f.mu.err == nil
	if err == nil && first {
		r, err = f.mu.state.Apply(&c)
		f.mu.index, f.mu.term = l.Index, l.Term
		touched = f.mu.state.takeTouched()
	}
	if err != nil && first {
		f.mu.err = fmt.Errorf("directory entry %d: %w", l.Index, err)
	}
	err = f.mu.err
	f.mu.Unlock()
	if len(touched) > 0 {
		f.feed.add(touched)
	}
	if err != nil {
		if first {
			f.broken(err)
		}
		return err
	}
	return r
}

// Snapshot implements raft.FSM. It shares the claims with the state, so it
// keeps Apply waiting for microseconds.
func (f *fsm) Snapshot() (raft.FSMSnapshot, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.mu.err != nil {
		return nil, f.mu.err
	}
	return persister{f.mu.state.Snapshot()}, nil
}

// Restore implements raft.FSM.
func (f *fsm) Restore(in io.ReadCloser) error {
	defer in.Close()
	s, err := Restore(bufio.NewReaderSize(in, snapshotBuffer), f.maxClaims)
	if err != nil {
		return err
	}
	f.mu.Lock()
	s.takeTouched()
	f.mu.state, f.mu.index, f.mu.term = s, 0, 0
	f.mu.Unlock()
	f.feed.addAll()
	f.replaced()
	return nil
}

// read calls see with the state. see keeps nothing of it.
func (f *fsm) read(see func(*State)) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	see(f.mu.state)
}

const snapshotBuffer = 256 << 10

// persister writes a snapshot where Raft wants it.
type persister struct{ snap *Snapshot }

// Persist implements raft.FSMSnapshot. It runs beside Apply.
func (p persister) Persist(sink raft.SnapshotSink) error {
	w := bufio.NewWriterSize(sink, snapshotBuffer)
	err := p.snap.Write(w)
	if err == nil {
		err = w.Flush()
	}
	if err != nil {
		if cancelErr := sink.Cancel(); cancelErr != nil {
			return fmt.Errorf("%w; cancelling it: %w", err, cancelErr)
		}
		return err
	}
	return sink.Close()
}

// Release implements raft.FSMSnapshot.
func (persister) Release() {}
