package sessions

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// A node that is taken out is given no session, new or moving, and says why; it goes on
// with those that it has.
func TestDrainingNodeTakesNoSession(t *testing.T) {
	inWorld(t, 2, nil, func(t *testing.T, w *world) {
		a, b := w.nodes[0], w.nodes[1]
		a.mustOpen("s", nil)
		a.grow("s", 1, 0, 10)
		b.mustOpen("own", nil)
		draining := &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_SetNodeState{SetNodeState: &kvtierv1.SetNodeState{
			Node: b.id[:], Incarnation: uint64(b.incarnation), State: kvtierv1.NodeState_NODE_STATE_DRAINING}}}
		if r, err := a.n.Directory().Propose(t.Context(), draining); err != nil || r != kvtierv1.DirectoryResult_DIRECTORY_RESULT_OK {
			t.Fatalf("%v, %v", r, err)
		}
		w.eventually(time.Second, "both know of it", func() bool {
			for _, m := range w.nodes {
				if rec, _ := m.m.node(b.id); !rec.Withdrawn() {
					return false
				}
			}
			return true
		})
		if _, err := b.open("new", nil); !errors.Is(err, paging.ErrUnavailable) || !strings.Contains(err.Error(), "drained") {
			t.Errorf("opened there: %v", err)
		}
		if _, _, err := a.move("s", b, nil); !errors.Is(err, paging.ErrNoSpace) || !strings.Contains(err.Error(), "draining") {
			t.Errorf("moved there: %v", err)
		}
		if _, err := b.append("own", 0, chain(2, 0, 1)); err != nil {
			t.Errorf("an append to what it has: %v", err)
		}
		w.owner("s", a)
	})
}
