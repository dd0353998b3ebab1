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
