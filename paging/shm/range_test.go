//go:build linux

package shm

import (
	"bytes"
	"errors"
	"testing"

	"github.com/kvtier/kvtier/paging"
)

func TestRange(t *testing.T) {
	r, err := Reserve(16 * paging.UnitBytes)
	if err != nil {
		t.Fatal(err)
	}
	extent, err := CreateExtent("kvtier-test", 4*paging.UnitBytes, Options{NUMANode: -1})
	if err != nil {
		t.Fatal(err)
	}
	working, err := CreateStaging("kvtier-test", 2*paging.UnitBytes)
	if err != nil {
		t.Fatal(err)
	}
	a, err := r.MapReadOnly(8*paging.UnitBytes, extent.FD(), extent.Size())
	if err != nil {
		t.Fatal(err)
	}
	b, err := r.MapReadWrite(12*paging.UnitBytes, working.FD(), working.Size())
	if err != nil {
		t.Fatal(err)
	}
	copy(extent.Bytes(), "in the pool")
	copy(r.Bytes()[12*paging.UnitBytes:], "by the engine")
	if !bytes.HasPrefix(r.Bytes()[8*paging.UnitBytes:12*paging.UnitBytes], []byte("in the pool")) || !bytes.HasPrefix(working.Bytes(), []byte("by the engine")) {
		t.Error("the range does not show what is mapped in it")
	}
	for name, bad := range map[string]func() (*Memory, error){
		"beyond the end":       func() (*Memory, error) { return r.MapReadOnly(13*paging.UnitBytes, extent.FD(), extent.Size()) },
		"not on a unit":        func() (*Memory, error) { return r.MapReadOnly(100, extent.FD(), extent.Size()) },
		"a pool for writing":   func() (*Memory, error) { return r.MapReadWrite(0, extent.FD(), 5*paging.UnitBytes) },
		"staging as an extent": func() (*Memory, error) { return r.MapReadOnly(0, working.FD(), working.Size()) },
	} {
		if _, err := bad(); !errors.Is(err, paging.ErrInvalid) && !errors.Is(err, paging.ErrIncompatible) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := r.MapReadOnly(8*paging.UnitBytes, extent.FD(), extent.Size())
	if err != nil || !bytes.HasPrefix(again.Bytes(), []byte("in the pool")) {
		t.Errorf("mapped again: %v", err)
	}
	if err := errors.Join(again.Close(), b.Close(), r.Close(), r.Close(), extent.Close(), working.Close()); err != nil {
		t.Error(err)
	}
}
