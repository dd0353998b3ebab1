package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
)

// planVersion is the version of the file format of plans.
const planVersion = 1

// maxPlanBytes bounds a file that is read.
const maxPlanBytes = 256 << 20

// planFile is a plan as a file that a person reads and edits: steps may be removed or
// put in another order. What only informs is not read back.
type planFile struct {
	Version  int            `yaml:"version"`
	Bytes    int64          `yaml:"bytes"`
	Expected string         `yaml:"expected,omitempty"`
	More     bool           `yaml:"more,omitempty"`
	Moves    []planMove     `yaml:"moves"`
	Copies   []planCopy     `yaml:"copies,omitempty"`
	Drops    []planDrop     `yaml:"drops,omitempty"`
	Unplaced []planUnplaced `yaml:"unplaced,omitempty"`
}

type planTiers struct {
	HBM  int64 `yaml:"hbm,omitempty"`
	RAM  int64 `yaml:"ram,omitempty"`
	NVMe int64 `yaml:"nvme,omitempty"`
}

type planMove struct {
	Session string    `yaml:"session"`
	From    string    `yaml:"from"`
	To      string    `yaml:"to"`
	Epoch   uint64    `yaml:"epoch"`
	Lands   planTiers `yaml:"lands,flow"`
	Why     string    `yaml:"why,omitempty"`
}

type planCopy struct {
	From  string    `yaml:"from"`
	To    string    `yaml:"to"`
	Hot   bool      `yaml:"hot"`
	Lands planTiers `yaml:"lands,flow"`
	Why   string    `yaml:"why,omitempty"`
}

type planDrop struct {
	Node  string `yaml:"node"`
	Bytes int64  `yaml:"bytes"`
	Why   string `yaml:"why,omitempty"`
}

type planUnplaced struct {
	Session string `yaml:"session,omitempty"`
	Node    string `yaml:"node"`
	Bytes   int64  `yaml:"bytes"`
	Why     string `yaml:"why,omitempty"`
}

func tiersOf(b placement.TierBytes) planTiers {
	return planTiers{b[placement.HBM], b[placement.RAM], b[placement.NVMe]}
}

func (t planTiers) bytes() placement.TierBytes { return placement.TierBytes{t.HBM, t.RAM, t.NVMe} }

// encodePlan writes a plan as YAML.
func encodePlan(p *placement.Plan) ([]byte, error) {
	f := planFile{Version: planVersion, Bytes: p.Bytes, More: p.More, Moves: []planMove{}}
	if p.Expected > 0 {
		f.Expected = p.Expected.String()
	}
	for _, m := range p.Moves {
		f.Moves = append(f.Moves, planMove{string(m.Session), m.From.String(), m.To.String(), uint64(m.Epoch), tiersOf(m.Lands), m.Why})
	}
	for _, c := range p.Copies {
		f.Copies = append(f.Copies, planCopy{c.From.String(), c.To.String(), c.Hot, tiersOf(c.Lands), c.Why})
	}
	for _, d := range p.Drops {
		f.Drops = append(f.Drops, planDrop{d.Node.String(), d.Bytes, d.Why})
	}
	for _, x := range p.Unplaced {
		f.Unplaced = append(f.Unplaced, planUnplaced{string(x.Session), x.Node.String(), x.Bytes, x.Why})
	}
	return yaml.Marshal(f)
}

// decodePlan reads a plan, perhaps edited, and reports all that is wrong with it. Its
// sums are those of the steps that are left. Errors: paging.ErrInvalid.
func decodePlan(data []byte) (*placement.Plan, error) {
	var f planFile
	if len(data) > maxPlanBytes {
		return nil, fmt.Errorf("a plan of %d bytes, at most %d: %w", len(data), maxPlanBytes, paging.ErrInvalid)
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	dec.KnownFields(true)
	if err := dec.Decode(&f); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("plan: %w: %w", paging.ErrInvalid, err)
	}
	if f.Version != planVersion {
		return nil, fmt.Errorf("plan of version %d, want %d: %w", f.Version, planVersion, paging.ErrInvalid)
	}
	r := planReader{}
	p := &placement.Plan{More: f.More}
	if f.Expected != "" {
		var err error
		p.Expected, err = time.ParseDuration(f.Expected)
		r.check(err == nil, "expected %q is no time", f.Expected)
	}
	seen := map[string]bool{}
	for i, m := range f.Moves {
		at := fmt.Sprintf("moves[%d]", i)
		x := placement.Move{Session: placement.SessionID(m.Session), From: r.node(at, m.From), To: r.node(at, m.To), Epoch: placement.Epoch(m.Epoch), Lands: r.lands(at, m.Lands), Why: m.Why}
		r.check(m.Session != "" && m.Epoch > 0, "%s needs a session and its epoch", at)
		r.check(x.From != x.To, "%s is from a node to itself", at)
		r.check(!seen[m.Session] || m.Session == "", "%s moves session %q, which moves already", at, m.Session)
		seen[m.Session] = true
		x.Bytes = x.Lands.Sum()
		p.Bytes += x.Bytes
		p.Moves = append(p.Moves, x)
	}
	for i, c := range f.Copies {
		at := fmt.Sprintf("copies[%d]", i)
		x := placement.SoleCopy{From: r.node(at, c.From), To: r.node(at, c.To), Hot: c.Hot, Lands: r.lands(at, c.Lands), Why: c.Why}
		r.check(x.From != x.To, "%s is from a node to itself", at)
		x.Bytes = x.Lands.Sum()
		p.Bytes += x.Bytes
		p.Copies = append(p.Copies, x)
	}
	for i, d := range f.Drops {
		at := fmt.Sprintf("drops[%d]", i)
		r.check(d.Bytes >= 0, "%s is of %d bytes", at, d.Bytes)
		p.Drops = append(p.Drops, placement.SoleDrop{Node: r.node(at, d.Node), Bytes: d.Bytes, Why: d.Why})
	}
	for i, u := range f.Unplaced {
		p.Unplaced = append(p.Unplaced, placement.Unplaced{Session: placement.SessionID(u.Session), Node: r.node(fmt.Sprintf("unplaced[%d]", i), u.Node), Bytes: u.Bytes, Why: u.Why})
	}
	if len(r.problems) > 0 {
		return nil, errors.Join(r.problems...)
	}
	return p, nil
}

// maxPlanProblems is how many are reported.
const maxPlanProblems = 20

type planReader struct{ problems []error }

func (r *planReader) check(ok bool, format string, args ...any) {
	if !ok && len(r.problems) < maxPlanProblems {
		r.problems = append(r.problems, fmt.Errorf("plan: %s: %w", fmt.Sprintf(format, args...), paging.ErrInvalid))
	}
}

func (r *planReader) node(at, text string) placement.NodeID {
	id, err := placement.ParseNodeID(text)
	r.check(err == nil, "%s: %q is no node id", at, text)
	return id
}

func (r *planReader) lands(at string, t planTiers) placement.TierBytes {
	r.check(t.HBM >= 0 && t.RAM >= 0 && t.NVMe >= 0, "%s lands %v bytes", at, t)
	return t.bytes()
}
