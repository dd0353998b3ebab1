package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/client"
)

// What drain prints as JSON, that programs read.
func TestDrainJSON(t *testing.T) {
	b, err := json.Marshal(drainOut{Proposal: &client.Proposal{Steps: []client.PlanStep{{}}, Unplaced: []client.PlanUnplaced{{}}}, Plan: &client.PlanStatus{}})
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"proposal":{"steps":[{"kind":"","session":"","epoch":0,"from":"","to":"","bytes":0,"hot":false,"why":"","state":"","reason":"","done_bytes":0,"hbm_bytes":0,"ram_bytes":0,"nvme_bytes":0}],` +
		`"unplaced":[{"session":"","node":"","bytes":0,"why":""}],"more":false,"bytes":0,"expected_s":0},` +
		`"plan":{"plan":"","kind":"","node":"","state":"","why":"","who":"","round":0,"started":"0001-01-01T00:00:00Z","took_s":0,"sessions":0,"moved_sessions":0,"bytes":0,"copied_bytes":0,` +
		`"bytes_per_second":0,"left_s":0,"left_sessions":0,"left_bytes":0,"doing":"","steps":null}}`
	if string(b) != want {
		t.Errorf("%s\nwant\n%s", b, want)
	}
}

// A plan that ended otherwise than done is a failure that says what is left.
func TestEndOfPlan(t *testing.T) {
	var b bytes.Buffer
	out := &output{w: &b}
	if err := endOfPlan(out, &client.PlanStatus{Kind: "drain", Node: "n", State: "done", Moved: 2, CopiedBytes: 1 << 20}); err != nil || !strings.Contains(b.String(), "drain of n: done in 0s: 2 sessions moved, 1 MiB copied") {
		t.Errorf("%q, %v", b.String(), err)
	}
	for _, p := range []*client.PlanStatus{nil, {Kind: "drain", State: "failed", Why: "the deadline has passed"}, {State: "cancelled"}} {
		if err := endOfPlan(out, p); !errors.Is(err, errLeft) || p != nil && !strings.Contains(err.Error(), p.Why) {
			t.Errorf("%+v: %v", p, err)
		}
	}
}

// A proposal goes through its file to the steps that are carried out.
func TestPlanThroughAFile(t *testing.T) {
	a, b := strings.Repeat("01", 16), strings.Repeat("02", 16)
	p := &client.Proposal{Steps: []client.PlanStep{{Kind: "move", Session: "t/s", Epoch: 3, From: a, To: b, Bytes: 30, RAMBytes: 10, NVMeBytes: 20, Why: "why"}}}
	file := filepath.Join(t.TempDir(), "plan.yaml")
	if err := writePlan(file, p); err != nil {
		t.Fatal(err)
	}
	if err := writePlan(file, p); err == nil {
		t.Error("a file that exists was written over")
	}
	got, err := readPlan(file)
	want := []client.PlanStep{{Kind: "move", Session: "t/s", Epoch: 3, From: a, To: b, Bytes: 30, Why: "why"}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
}
