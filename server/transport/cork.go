package transport

import (
	"crypto/tls"
	"net"
	"sync"
)

// corkBytes is what is gathered under TLS before it is written. The library
// writes each record of 16 KiB by itself.
const corkBytes = 256 << 10

// cork is a connection below TLS whose writer can hold small writes back until
// a batch is whole. Without that every record, and every frame header as a record
// of its own, is a call of the kernel.
type cork struct {
	net.Conn

	mu   sync.Mutex // the reader's side of TLS writes too, now and then
	held bool
	buf  []byte
	err  error // of an earlier write
}

// corkOf is the cork below a connection; nil: it has none.
func corkOf(c net.Conn) *cork {
	if t, ok := c.(*tls.Conn); ok {
		below, _ := t.NetConn().(*cork)
		return below
	}
	return nil
}

// Write implements net.Conn. While the connection is held an error shows at a
// later Write or at release.
func (c *cork) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.held || c.err != nil {
		if c.err != nil {
			return 0, c.err
		}
		return c.Conn.Write(p)
	}
	if len(c.buf)+len(p) > corkBytes {
		c.flushLocked()
	}
	c.buf = append(c.buf, p...)
	return len(p), c.err
}

func (c *cork) flushLocked() {
	if len(c.buf) > 0 && c.err == nil {
		_, c.err = c.Conn.Write(c.buf)
	}
	c.buf = c.buf[:0]
}

// hold gathers what is written from now on.
func (c *cork) hold() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.buf == nil {
		c.buf = make([]byte, 0, corkBytes)
	}
	c.held = true
}

// release writes what was gathered.
func (c *cork) release() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.flushLocked()
	c.held = false
	return c.err
}
