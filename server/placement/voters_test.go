package placement

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// TestVoters replays scripts: a line per node, "1 voter" is a replica with a
// vote, "2 follower" one without, "3" a member that is no replica; then "seen"
// (default), "gone 12s" or "left". Node 1 leads unless the command says so.
func TestVoters(t *testing.T) {
	datadriven.RunTest(t, "testdata/voters", func(t *testing.T, d *datadriven.TestData) string {
		leader := 1
		d.MaybeScanArgs(t, "leader", &leader)
		var replicas []Replica
		var members []Member
		for line := range strings.Lines(d.Input) {
			f := strings.Fields(line)
			var n byte
			if _, err := fmt.Sscan(f[0], &n); err != nil {
				d.Fatalf(t, "%q: %v", line, err)
			}
			m := Member{ID: NodeID{n}, Seen: true}
			for i, word := range f[1:] {
				switch word {
				case "voter", "follower":
					replicas = append(replicas, Replica{ID: m.ID, Voter: word == "voter"})
				case "left":
					m.Left, m.Seen = true, false
				case "gone":
					m.Seen = false
					gone, err := time.ParseDuration(f[i+2])
					if err != nil {
						d.Fatalf(t, "%q: %v", line, err)
					}
					m.Gone = gone
				}
			}
			members = append(members, m)
		}
		return decide(replicas, members, NodeID{byte(leader)})
	})
}

// decide makes change after change, as a leader does, until none is left.
func decide(replicas []Replica, members []Member, self NodeID) string {
	var out strings.Builder
	for range 40 {
		c, ok := NextChange(replicas, members, self, 10*time.Second)
		if !ok {
			return out.String() + "settled: " + describe(replicas) + "\n"
		}
		fmt.Fprintf(&out, "%s %d: %s\n", c.Kind, c.Node[0], c.Why)
		replicas = changed(replicas, c)
	}
	return out.String() + "never settles\n"
}

func changed(replicas []Replica, c Change) []Replica {
	var out []Replica
	for _, r := range replicas {
		switch {
		case r.ID != c.Node:
			out = append(out, r)
		case c.Kind == RemoveReplica:
		default:
			out = append(out, Replica{ID: r.ID, Voter: c.Kind == Promote})
		}
	}
	if c.Kind == AddReplica {
		out = append(out, Replica{ID: c.Node})
	}
	return out
}

func describe(replicas []Replica) string {
	var voters, followers []string
	for _, r := range replicas {
		if r.Voter {
			voters = append(voters, fmt.Sprint(r.ID[0]))
		} else {
			followers = append(followers, fmt.Sprint(r.ID[0]))
		}
	}
	return "voters " + strings.Join(voters, " ") + ", followers " + strings.Join(followers, " ")
}
