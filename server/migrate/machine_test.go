package migrate

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/kvtier/kvtier/server/placement"
)

var (
	nodeA = placement.NodeID{0xa}
	nodeB = placement.NodeID{0xb}
	nodeC = placement.NodeID{0xc}
	start = time.Unix(1000, 0)
)

func node(t *testing.T, s string) placement.NodeID {
	id, ok := map[string]placement.NodeID{"a": nodeA, "b": nodeB, "c": nodeC}[s]
	if !ok {
		t.Fatalf("node %q", s)
	}
	return id
}

var phases = map[string]Phase{"gone": Gone, "active": Active, "moving": Moving, "frozen": Frozen}

// TestMachine replays scripts: a line is an event. "start" and "resume PHASE" make a
// machine of A that moves a session of epoch 7 to B; "record PHASE [owner=c] [epoch=8]
// [move=2]"; "lacks BLOCKS BYTES [nowhere=N] [number=N]"; "copied BYTES"; "failed
// unreachable|unreadable|noroom|incompatible [BYTES]"; "refused|unsure
// prepare|freeze|commit|abort"; "unfit"; "cancel"; "+250ms" lets time pass and ticks.
func TestMachine(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		now := start
		var m Machine
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			var out strings.Builder
			for line := range strings.Lines(d.Input) {
				line = strings.TrimSpace(line)
				actions := scriptLine(t, &m, &now, strings.Fields(line))
				fmt.Fprintf(&out, "%s\n%s", line, actionsText(actions))
			}
			p := m.Progress()
			fmt.Fprintf(&out, "= %v, round %d, lacked %d, sent %d", p.State, p.Round, p.Lacked, p.Sent)
			if p.Nowhere > 0 {
				fmt.Fprintf(&out, ", %d nowhere", p.Nowhere)
			}
			if p.State.Ended() {
				fmt.Fprintf(&out, ", pause %v, %q", p.Pause, p.Why)
			}
			return out.String() + "\n"
		})
	})
}

func scriptLine(t *testing.T, m *Machine, now *time.Time, f []string) (actions []Action) {
	t.Helper()
	if d, ok := strings.CutPrefix(f[0], "+"); ok {
		after, err := time.ParseDuration(d)
		if err != nil {
			t.Fatal(err)
		}
		*now = now.Add(after)
		return m.Step(Event{Kind: Tick, Now: *now})
	}
	e := Event{Now: *now, Number: m.number}
	r := Record{Owner: nodeA, Epoch: 7, Move: placement.MoveID{1}, Target: nodeB}
	var words []string
	for _, w := range f[1:] {
		var n int
		switch k, v, named := strings.Cut(w, "="); {
		case !named:
			words = append(words, w)
			continue
		case k == "owner":
			r.Owner = node(t, v)
		default:
			if _, err := fmt.Sscan(v, &n); err != nil {
				t.Fatal(err)
			}
			switch k {
			case "epoch":
				r.Epoch = placement.Epoch(n)
			case "move":
				r.Move[0] = byte(n)
			case "number":
				e.Number = n
			case "nowhere":
				e.Nowhere = n
			}
		}
	}
	number := func(i int) (n int64) {
		if i < len(words) {
			_, _ = fmt.Sscan(words[i], &n)
		}
		return n
	}
	switch f[0] {
	case "start":
		*m, actions = Start(r.Move, r, nodeB, Limits{}, *now)
		return actions
	case "resume":
		r.Phase = phases[words[0]]
		next, actions, ok := Resume(r, nodeA, Limits{}, *now)
		if !ok {
			return []Action{{Text: "nothing to resume"}}
		}
		*m = next
		return actions
	case "record":
		e.Kind, e.Record = Recorded, r
		e.Record.Phase = phases[words[0]]
	case "lacks":
		e.Kind, e.Blocks, e.Bytes = Answered, int(number(0)), number(1)
	case "copied":
		e.Kind, e.Bytes = Copied, number(0)
	case "failed":
		e.Kind, e.Bytes = Failed, number(1)
		e.Failure = map[string]Failure{"unreachable": Unreachable, "unreadable": Unreadable, "noroom": NoRoom, "incompatible": Incompatible}[words[0]]
	case "refused", "unsure":
		e.Kind = map[string]EventKind{"refused": Refused, "unsure": Unsure}[f[0]]
		for k, name := range actionNames {
			if name == words[0] {
				e.Proposal = ActionKind(k)
			}
		}
		e.Text = "it is not so"
	case "unfit":
		e.Kind, e.Text = TargetUnfit, "is down"
	case "cancel":
		e.Kind, e.Text = Cancel, "cancelled by an operator"
	default:
		t.Fatalf("%q", f)
	}
	return m.Step(e)
}

func actionsText(actions []Action) string {
	var b strings.Builder
	for _, a := range actions {
		fmt.Fprintf(&b, "    %v", a.Kind)
		switch {
		case a.Kind == Notify:
			fmt.Fprintf(&b, " %v", a.State)
		case a.Number > 0:
			fmt.Fprintf(&b, " %d", a.Number)
		case a.Kind == Prepare || a.Kind == Freeze || a.Kind == Commit || a.Kind == Abort:
			fmt.Fprintf(&b, " at epoch %d", a.Epoch)
		}
		if a.Text != "" {
			fmt.Fprintf(&b, ": %s", a.Text)
		}
		b.WriteString("\n")
	}
	return b.String()
}

func TestTakesOver(t *testing.T) {
	for _, phase := range []Phase{Gone, Active, Moving, Frozen} {
		for _, down := range []bool{false, true} {
			r := Record{Phase: phase, Owner: nodeA, Target: nodeB}
			want := down && phase >= Moving
			if got := TakesOver(r, nodeB, down); got != want {
				t.Errorf("phase %d, owner down %v: %v", phase, down, got)
			}
			if TakesOver(r, nodeC, down) || TakesOver(r, nodeA, down) {
				t.Error("a node that is not the target takes it over")
			}
		}
	}
}

func TestAdvise(t *testing.T) {
	for _, c := range []struct {
		bytes, tokens int64
		rates         Rates
		want          Advice
	}{
		{0, 0, Rates{1000, 1e9}, Advice{}},
		{2e9, 10_000, Rates{1000, 1e9}, Advice{2 * time.Second, 10 * time.Second, false}},
		{2e9, 1_000, Rates{1000, 1e9}, Advice{2 * time.Second, time.Second, true}},
		{2e9, 1_000, Rates{0, 1e9}, Advice{2 * time.Second, 0, false}},
		{2e9, 1_000, Rates{1000, 0}, Advice{0, time.Second, false}},
		{0, 1_000, Rates{1000, 1e9}, Advice{0, time.Second, false}},
		{1e18, 1, Rates{1, 1e-9}, Advice{365 * 24 * time.Hour, time.Second, true}},
	} {
		if got := Advise(c.bytes, c.tokens, c.rates); got != c.want {
			t.Errorf("%d bytes, %d tokens, %+v: %+v, want %+v", c.bytes, c.tokens, c.rates, got, c.want)
		}
	}
}
