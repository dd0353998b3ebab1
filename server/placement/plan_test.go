package placement

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// TestPlans replays scripts. Lines: "node 1 budget=0/100/1000 used=0/50/0
// gives=0/10/0 up|draining|down speed=N hits=N hot=N cold=N" (bytes by tier are
// HBM/RAM/NVMe), "run a=1:0/10/0 a=2:0/10/0", "session s at=1 bytes=0/10/0 runs=0,1
// idle=5m prio=50 hits=N". Commands: "drain nodes=1,2" and "rebalance", with
// options slack, fill, moves, bytes, speed, drop-cold, weights=B/S/T.
func TestPlans(t *testing.T) {
	datadriven.Walk(t, "testdata/plans", func(t *testing.T, path string) {
		var u *Usage
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			if d.Cmd == "usage" {
				u = parseUsage(t, d)
				return ""
			}
			var p *Plan
			var err error
			o := parseOptions(t, d)
			switch d.Cmd {
			case "drain":
				var nodes []NodeID
				for _, a := range d.CmdArgs {
					if a.Key == "nodes" {
						for _, v := range a.Vals {
							nodes = append(nodes, NodeID{byte(atoi(t, v))})
						}
					}
				}
				p, err = PlanDrain(u, nodes, o)
			case "rebalance":
				p, err = PlanRebalance(u, o)
			default:
				d.Fatalf(t, "no such command")
			}
			if err != nil {
				return fmt.Sprintf("%v (no target: %v)\n", err, errors.Is(err, ErrNoTarget))
			}
			checkPlan(t, u, p, o)
			if d.HasArg("apply") {
				u = applyPlan(u, p)
			}
			return planText(p)
		})
	})
}

func atoi(t *testing.T, s string) int64 {
	t.Helper()
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func parseTiers(t *testing.T, s string) (b TierBytes) {
	for i, f := range strings.Split(s, "/") {
		b[i] = atoi(t, f)
	}
	return b
}

func parseOptions(t *testing.T, d *datadriven.TestData) (o Options) {
	o.Fill = 1 // so that numbers are round
	for _, a := range d.CmdArgs {
		switch a.Key {
		case "slack":
			o.Slack, _ = strconv.ParseFloat(a.Vals[0], 64)
		case "fill":
			o.Fill, _ = strconv.ParseFloat(a.Vals[0], 64)
		case "moves":
			o.MaxMoves = int(atoi(t, a.Vals[0]))
		case "bytes":
			o.MaxBytes = atoi(t, a.Vals[0])
		case "speed":
			o.BytesPerSecond = atoi(t, a.Vals[0])
		case "drop-cold":
			o.DropCold = true
		case "weights":
			w := parseTiers(t, a.Vals[0])
			o.Weights = Weights{float64(w[0]), float64(w[1]), float64(w[2])}
		}
	}
	return o
}

func parseUsage(t *testing.T, d *datadriven.TestData) *Usage {
	u := &Usage{}
	for line := range strings.Lines(d.Input) {
		f := strings.Fields(line)
		switch f[0] {
		case "node":
			n := NodeUsage{ID: NodeID{byte(atoi(t, f[1]))}, Name: "n" + f[1], Status: Up}
			for _, w := range f[2:] {
				k, v, _ := strings.Cut(w, "=")
				switch k {
				case "budget":
					n.Budget = parseTiers(t, v)
				case "used":
					n.Used = parseTiers(t, v)
				case "gives":
					n.GivesWay = parseTiers(t, v)
				case "draining":
					n.Status = Draining
				case "down":
					n.Status = Down
				case "speed":
					n.BytesPerSecond = atoi(t, v)
				case "hits":
					n.HitBytesPerSecond = atoi(t, v)
				case "hot":
					n.SoleHotBytes = atoi(t, v)
				case "cold":
					n.SoleColdBytes = atoi(t, v)
				default:
					t.Fatalf("%q", w)
				}
			}
			u.Nodes = append(u.Nodes, n)
		case "run":
			var r SharedRun
			for _, w := range f[1:] {
				node, bytes, _ := strings.Cut(w, ":")
				at := RunAt{NodeID{byte(atoi(t, node))}, parseTiers(t, bytes)}
				r.Bytes = at.Bytes.Sum()
				r.At = append(r.At, at)
			}
			u.Shared = append(u.Shared, r)
		case "session":
			s := SessionUsage{ID: SessionID(f[1]), Epoch: 1}
			for _, w := range f[2:] {
				k, v, _ := strings.Cut(w, "=")
				switch k {
				case "at":
					s.Owner = NodeID{byte(atoi(t, v))}
				case "bytes":
					s.Bytes = parseTiers(t, v)
				case "runs":
					for _, r := range strings.Split(v, ",") {
						s.Shared = append(s.Shared, int32(atoi(t, r)))
					}
				case "idle":
					s.Idle, _ = time.ParseDuration(v)
				case "prio":
					s.Priority = int(atoi(t, v))
				case "hits":
					s.HitBytesPerSecond = atoi(t, v)
				default:
					t.Fatalf("%q", w)
				}
			}
			u.Sessions = append(u.Sessions, s)
		default:
			t.Fatalf("%q", line)
		}
	}
	return u
}

func planText(p *Plan) string {
	var b strings.Builder
	for _, m := range p.Moves {
		fmt.Fprintf(&b, "move %s %d -> %d, %d bytes to %v: %s\n", m.Session, m.From[0], m.To[0], m.Bytes, m.Lands, m.Why)
	}
	for _, c := range p.Copies {
		fmt.Fprintf(&b, "copy %d -> %d, hot %v, %d bytes to %v: %s\n", c.From[0], c.To[0], c.Hot, c.Bytes, c.Lands, c.Why)
	}
	for _, x := range p.Drops {
		fmt.Fprintf(&b, "drop at %d: %s\n", x.Node[0], x.Why)
	}
	for _, x := range p.Unplaced {
		fmt.Fprintf(&b, "stays at %d: %q, %d bytes: %s\n", x.Node[0], x.Session, x.Bytes, x.Why)
	}
	if b.Len() == 0 {
		b.WriteString("nothing to do\n")
	}
	if p.Expected > 0 {
		fmt.Fprintf(&b, "%d bytes in %v\n", p.Bytes, p.Expected)
	}
	if p.More {
		b.WriteString("more in the next plan\n")
	}
	return b.String()
}
