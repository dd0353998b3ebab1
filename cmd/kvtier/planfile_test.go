package main

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
)

func TestPlanFile(t *testing.T) {
	a, b := placement.NodeID{1}, placement.NodeID{2}
	plan := &placement.Plan{
		Moves: []placement.Move{
			{Session: "s: 1", From: a, To: b, Epoch: 3, Bytes: 30, Lands: placement.TierBytes{0, 10, 20}, Why: "n1 is drained; n2 is at its share"},
			{Session: "true", From: a, To: b, Epoch: 1, Why: "x"},
		},
		Copies:   []placement.SoleCopy{{From: a, To: b, Hot: true, Bytes: 7, Lands: placement.TierBytes{0, 7, 0}, Why: "y"}},
		Drops:    []placement.SoleDrop{{Node: a, Bytes: 9, Why: "z"}},
		Unplaced: []placement.Unplaced{{Session: "q", Node: a, Bytes: 5, Why: "no room"}, {Node: a, Bytes: 6, Why: "no room"}},
		Bytes:    37, Expected: 1500 * time.Millisecond, More: true,
	}
	data, err := encodePlan(plan)
	if err != nil {
		t.Fatal(err)
	}
	got, err := decodePlan(data)
	if err != nil || !cmp.Equal(got, plan) {
		t.Fatalf("%v\n%s\n%s", err, cmp.Diff(plan, got), data)
	}

	text := string(data)
	at, end := strings.Index(text, `    - session: "true"`), strings.Index(text, "copies:")
	got, err = decodePlan([]byte(text[:at] + text[end:]))
	if err != nil || len(got.Moves) != 1 || got.Bytes != 37 {
		t.Errorf("a plan without a move: %+v, %v", got, err)
	}
	for _, edit := range [][2]string{
		{"version: 1", "version: 2"},
		{`to: "02`, `to: "01`},
		{`to: "02`, `to: "2`},
		{"epoch: 3", "epoch: 0"},
		{"epoch: 3", "epoch: x"},
		{"ram: 10", "ram: -10"},
		{"ram: 10", "rma: 10"},
		{`"true"`, `"s: 1"`},
		{"bytes: 9", "bytes: -9"},
		{"expected: 1.5s", "expected: soon"},
		{text, ""},
	} {
		edited := strings.Replace(text, edit[0], edit[1], 1)
		if edited == text {
			t.Fatalf("%q is not in\n%s", edit[0], text)
		}
		if _, err := decodePlan([]byte(edited)); !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("%q instead of %q: %v", edit[1], edit[0], err)
		}
	}
}
