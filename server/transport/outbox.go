package transport

import (
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/kvtier/kvtier/paging"
)

// maxOutboxBytes bounds the frames that wait to be written: a few of the
// longest, which a peer that reads takes in milliseconds.
const maxOutboxBytes = 4 << 20

// outbox gathers the small frames of one connection, which one goroutine
// writes: whoever sends one never waits for the network.
type outbox struct {
	conn    net.Conn
	timeout time.Duration // for a write
	wake    chan struct{} // capacity 1

	mu     sync.Mutex
	buf    []byte
	closed bool
}

func newOutbox(c net.Conn, timeout time.Duration) *outbox {
	return &outbox{conn: c, timeout: timeout, wake: make(chan struct{}, 1)}
}

// send queues a frame. paging.ErrUnavailable if too much waits already, or the
// connection has ended.
func (o *outbox) send(h header, payload []byte) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed || len(o.buf)+len(payload) > maxOutboxBytes {
		return fmt.Errorf("%d bytes wait to be sent already: %w", len(o.buf), paging.ErrUnavailable)
	}
	o.buf = appendFrame(o.buf, h, payload)
	wake(o.wake)
	return nil
}

// run writes until the outbox is closed or a write fails.
func (o *outbox) run() error {
	var spare []byte
	for range o.wake {
		o.mu.Lock()
		out, closed := o.buf, o.closed
		o.buf = spare[:0]
		o.mu.Unlock()
		if closed {
			return nil
		}
		if len(out) > 0 {
			if err := o.conn.SetWriteDeadline(time.Now().Add(o.timeout)); err != nil {
				return err
			}
			if _, err := o.conn.Write(out); err != nil {
				return err
			}
		}
		if spare = out; cap(spare) > maxOutboxBytes/4 {
			spare = nil
		}
	}
	return nil
}

// close ends run; what waits is not written.
func (o *outbox) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	wake(o.wake)
}
