package directory

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/placement"
)

// A cluster goes back to a saved state, and its nodes make good by themselves
// what that state is behind: claims made and released since, and a node that was
// started again.
func TestRestoredDirectoryFollowsTheInventories(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newCluster(t, 3)
		w.voters(t, 3)
		r := rand.New(rand.NewPCG(testSeed(t), 6))
		steady, restarted := nodeID(1), nodeID(2)
		shelves := map[placement.NodeID]*shelf{}
		claimers := map[placement.NodeID]*Claimer{}
		for _, id := range []placement.NodeID{steady, restarted} {
			shelves[id] = &shelf{held: map[placement.BlockKey]paging.PartSet{}}
			for range 500 {
				shelves[id].set(randomKey(r, 100_000), 1)
			}
			claimers[id] = claimerFor(t, w, id, 1, shelves[id])
			w.follows(t, id, shelves[id], 10*time.Second)
		}
		var saved bytes.Buffer
		if err := w.node(steady).SaveSnapshot(&saved); err != nil {
			t.Fatal(err)
		}
		claimers[restarted].Close()
		claimers[restarted] = claimerFor(t, w, restarted, 2, shelves[restarted])
		for id, s := range shelves {
			for range 300 {
				k, parts := randomKey(r, 100_000), paging.PartSet(r.Uint64N(2))
				s.set(k, parts)
				claimers[id].Set(k, parts)
			}
			for k := range s.held { // of those that were saved
				s.set(k, 0)
				claimers[id].Set(k, 0)
				break
			}
			w.follows(t, id, s, 10*time.Second)
		}

		leader := w.leader(t, 5*time.Second)
		if err := w.node(leader).RestoreSnapshot(t.Context(), bytes.NewReader(saved.Bytes())); err != nil {
			t.Fatal(err)
		}
		for id, s := range shelves {
			w.follows(t, id, s, 15*time.Second)
		}
		w.agree(t, 10*time.Second)
		w.upNodes()[0].dir.Read(func(s *State) {
			if got := s.nodes[restarted].Incarnation; got != 2 {
				t.Errorf("the node that was started again is known in incarnation %d", got)
			}
		})
		// Claims go on as before.
		for id, s := range shelves {
			k := randomKey(r, 100_000)
			s.set(k, 3)
			claimers[id].Set(k, 3)
			w.follows(t, id, s, 5*time.Second)
		}
		if voters := w.node(leader).Status().Voters; voters != 3 {
			t.Errorf("%d voters after the restore", voters)
		}
	})
}

// What cannot be restored changes nothing.
func TestRestoreRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newCluster(t, 3)
		w.voters(t, 3)
		leader := w.leader(t, 5*time.Second)
		w.propose(t, leader, join(nodeID(50), 1, "before"), 5*time.Second)
		var saved, big, later bytes.Buffer
		if err := w.node(leader).SaveSnapshot(&saved); err != nil {
			t.Fatal(err)
		}
		if err := filled(1000).Snapshot().Write(&big); err != nil {
			t.Fatal(err)
		}
		snap := NewState(1).Snapshot()
		snap.header.Version++
		if err := snap.Write(&later); err != nil {
			t.Fatal(err)
		}
		w.propose(t, leader, join(nodeID(51), 1, "after"), 5*time.Second)
		w.agree(t, 5*time.Second)

		whole := saved.Bytes()
		flipped := slices.Clone(whole)
		flipped[len(flipped)/2] ^= 4
		d := w.node(leader)
		d.cfg.MaxClaims = 999 // nothing was claimed yet
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		for what, c := range map[string]struct {
			ctx  context.Context
			at   *Directory
			from []byte
			want error
		}{
			"a follower":   {t.Context(), w.upOther(leader), whole, paging.ErrUnavailable},
			"a bit":        {t.Context(), d, flipped, paging.ErrCorrupt},
			"cut":          {t.Context(), d, whole[:len(whole)-1], paging.ErrCorrupt},
			"goes on":      {t.Context(), d, append(slices.Clone(whole), 0), paging.ErrCorrupt},
			"nothing":      {t.Context(), d, nil, paging.ErrCorrupt},
			"later":        {t.Context(), d, later.Bytes(), paging.ErrIncompatible},
			"many claims":  {t.Context(), d, big.Bytes(), paging.ErrNoSpace},
			"caller ended": {ended, d, whole, context.Canceled},
		} {
			if err := c.at.RestoreSnapshot(c.ctx, bytes.NewReader(c.from)); !errors.Is(err, c.want) {
				t.Errorf("%s: %v, want %v", what, err, c.want)
			}
		}
		for _, n := range w.upNodes() {
			n.dir.Read(func(s *State) {
				if s.nodes[nodeID(51)] == nil {
					t.Errorf("node %s went back", n.id.Short())
				}
			})
		}
	})
}

// upOther is a node that is up, other than id.
func (w *network) upOther(id placement.NodeID) *Directory {
	for _, n := range w.upNodes() {
		if n.id != id {
			return n.dir
		}
	}
	return nil
}

func TestInspectSnapshot(t *testing.T) {
	s := NewState(1 << 40)
	for _, c := range everyCommand() {
		if _, err := s.Apply(c); err != nil {
			t.Fatal(err)
		}
	}
	snap := s.Snapshot()
	snap.header.LogIndex, snap.header.LogTerm = 42, 7
	var b bytes.Buffer
	if err := snap.Write(&b); err != nil {
		t.Fatal(err)
	}
	got, err := InspectSnapshot(bytes.NewReader(b.Bytes()))
	if err != nil {
		t.Fatal(err)
	}
	want := &Summary{
		Version: snapshotVersion, Time: time.UnixMilli(1_700_000_000_000 + int64(len(everyCommand())) - 1), Applied: uint64(len(everyCommand())), LogIndex: 42, LogTerm: 7,
		Namespaces: []NamespaceSummary{{Tenant: "t", Model: "m"}}, Claims: s.Claims(), Requests: 1, Plans: 2, Audit: 13, Bytes: int64(b.Len()),
	}
	for _, n := range s.Nodes() {
		want.Nodes = append(want.Nodes, NodeSummary{ID: n.ID, Incarnation: n.Incarnation, Name: n.Name, PeerAddress: n.PeerAddress, State: n.State, Gap: n.Gap, Claims: n.Claims, number: n.number})
	}
	for id := range s.namespaces {
		want.Namespaces[0].ID = id
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(NodeSummary{})); diff != "" {
		t.Errorf("summary (-want +got):\n%s", diff)
	}
	if want.Nodes[0].Claims == 0 || want.Nodes[0].State != kvtierv1.NodeState_NODE_STATE_LEFT {
		t.Errorf("the state says little: %+v", want.Nodes)
	}

	// Damage is told together with what was found.
	whole := b.Bytes()
	for what, bytesOf := range map[string][]byte{
		"cut": whole[:len(whole)-3], "goes on": append(slices.Clone(whole), 1), "empty": nil, "a bit": flip(whole, len(whole)-5),
	} {
		part, err := InspectSnapshot(bytes.NewReader(bytesOf))
		if !errors.Is(err, paging.ErrCorrupt) || part == nil {
			t.Errorf("%s: %+v, %v", what, part, err)
		}
		if what == "cut" && part.Claims != want.Claims {
			t.Errorf("%s: %d claims found, want %d", what, part.Claims, want.Claims)
		}
	}
	if _, err := InspectSnapshot(strings.NewReader("no snapshot at all")); !errors.Is(err, paging.ErrCorrupt) {
		t.Errorf("another file: %v", err)
	}
}

func flip(b []byte, at int) []byte {
	b = slices.Clone(b)
	b[at] ^= 1
	return b
}
