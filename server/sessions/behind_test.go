package sessions

import (
	"errors"
	"testing"
	"time"

	"github.com/kvtier/kvtier/paging"
)

// A node that was just started does not say that a session is not known before it has
// read its log again: an engine would give the session up.
func TestNothingIsAbsentBeforeTheLogIsRead(t *testing.T) {
	inWorld(t, 1, nil, func(t *testing.T, w *world) {
		a := w.nodes[0]
		a.mustOpen("s", nil)
		a.grow("s", 1, 0, 10)
		a.crash()
		a.start()
		refused := 0
		for ; ; w.sleep(time.Millisecond) {
			_, err := a.append("s", 10, chain(1, 10, 1))
			if err == nil {
				break
			}
			if refused++; errors.Is(err, paging.ErrNotFound) || !errors.Is(err, paging.ErrUnavailable) {
				t.Fatalf("after the start: %v", err)
			}
		}
		if refused == 0 {
			t.Error("the log was read at once: this test shows nothing")
		}
	})
}
