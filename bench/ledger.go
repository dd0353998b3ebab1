package bench

import (
	"sync"

	"github.com/kvtier/kvtier/paging"
)

// ledger is what the clients of a run know about the blocks of one namespace,
// so that what the node serves can be judged. Safe for concurrent use.
type ledger struct {
	mu        sync.Mutex
	tried     map[paging.BlockName]struct{} // a commit was asked for: may be stored
	committed map[paging.BlockName]struct{} // the node said that it is stored
	durable   map[paging.BlockName]struct{} // the node said that it is on disk
	order     []paging.BlockName            // committed and alive, in order
	abandoned []paging.BlockName            // filled and never committed
}

func newLedger() *ledger {
	return &ledger{
		tried: map[paging.BlockName]struct{}{}, committed: map[paging.BlockName]struct{}{}, durable: map[paging.BlockName]struct{}{},
	}
}

// willCommit is called before the commit of a block is asked for.
func (l *ledger) willCommit(name paging.BlockName) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tried[name] = struct{}{}
}

func (l *ledger) didCommit(name paging.BlockName, durable bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, again := l.committed[name]; !again {
		l.committed[name] = struct{}{}
		l.order = append(l.order, name)
	}
	if durable {
		l.durable[name] = struct{}{}
	}
}

// phantom reports whether the node cannot have this block: nobody asked for its
// commit.
func (l *ledger) phantom(name paging.BlockName) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, tried := l.tried[name]
	return !tried
}

func (l *ledger) isDurable(name paging.BlockName) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, ok := l.durable[name]
	return ok
}

// all returns the committed blocks in order of their first commit, and how many
// of them are durable.
func (l *ledger) all() (names []paging.BlockName, durable int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append(names, l.order...), len(l.durable)
}

// abandon notes blocks that were filled and will never be committed.
func (l *ledger) abandon(names []paging.BlockName) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.abandoned = append(l.abandoned, names...)
}

// neverCommitted returns the last n abandoned blocks.
func (l *ledger) neverCommitted(n int) []paging.BlockName {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]paging.BlockName(nil), l.abandoned[max(0, len(l.abandoned)-n):]...)
}

// forgetAbove takes all but the n newest blocks off the books, because they are
// to be dropped, and returns them.
func (l *ledger) forgetAbove(n int) []paging.BlockName {
	l.mu.Lock()
	defer l.mu.Unlock()
	cut := max(0, len(l.order)-n)
	old := append([]paging.BlockName(nil), l.order[:cut]...)
	l.order = append([]paging.BlockName(nil), l.order[cut:]...)
	for _, name := range old {
		delete(l.durable, name)
	}
	return old
}
