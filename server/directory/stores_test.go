package directory

import (
	"testing"

	"github.com/hashicorp/raft"
)

// A replica is restarted in one process when its disk answers again: everything that
// the stores lock has to be free by then.
func TestStoresAreOpenedAgain(t *testing.T) {
	dir := t.TempDir()
	for i := range uint64(3) {
		st, err := openStores(dir)
		if err != nil {
			t.Fatal(err)
		}
		last, err := st.log.LastIndex()
		if err != nil || last != i {
			t.Errorf("opened %d times: last entry %d, %v", i, last, err)
		}
		if err := st.log.StoreLog(&raft.Log{Index: i + 1, Term: 1}); err != nil {
			t.Fatal(err)
		}
		if err := st.close(); err != nil {
			t.Fatal(err)
		}
	}
}

// A leader that was cut off has its last entries replaced by those of the next one.
// What it kept can be read after a restart.
func TestTruncatedLogIsReadAfterARestart(t *testing.T) {
	dir := t.TempDir()
	const kept, truncated = 5, 10
	st, err := openStores(dir)
	if err != nil {
		t.Fatal(err)
	}
	store := func(index, term uint64) {
		t.Helper()
		if err := st.log.StoreLog(&raft.Log{Index: index, Term: term, Data: []byte{byte(index)}}); err != nil {
			t.Fatal(err)
		}
	}
	for i := uint64(1); i <= truncated; i++ {
		store(i, 1)
	}
	if err := st.log.DeleteRange(kept+1, truncated); err != nil {
		t.Fatal(err)
	}
	store(kept+1, 2)
	for range 2 {
		if err := st.close(); err != nil {
			t.Fatal(err)
		}
		if st, err = openStores(dir); err != nil {
			t.Fatal(err)
		}
		for i := uint64(1); i <= kept+1; i++ {
			var l raft.Log
			if err := st.log.GetLog(i, &l); err != nil || l.Index != i || l.Term != 1+i/(kept+1) || l.Data[0] != byte(i) {
				t.Errorf("entry %d: %+v, %v", i, l, err)
			}
		}
		if last, err := st.log.LastIndex(); err != nil || last != kept+1 {
			t.Errorf("last entry %d, %v", last, err)
		}
	}
	if err := st.close(); err != nil {
		t.Error(err)
	}
}
