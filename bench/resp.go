package bench

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
	"time"
)

// redis is a redis-server on a unix socket of its own, and a connection to it:
// what the zero-copy fetch is held against. Not safe for concurrent use.
type redis struct {
	cmd    *exec.Cmd
	exited chan struct{}
	conn   net.Conn
	in     *bufio.Reader
	out    *bufio.Writer
}

// redisReady bounds the wait for the server's socket.
const redisReady = 10 * time.Second

// startRedis starts a redis-server that keeps at most maxBytes and writes
// nothing to disk. exec.ErrNotFound: there is none on this machine.
func startRedis(ctx context.Context, dir string, maxBytes int64) (*redis, error) {
	program, err := exec.LookPath("redis-server")
	if err != nil {
		return nil, err
	}
	socket := filepath.Join(dir, "redis.sock")
	r := &redis{exited: make(chan struct{})}
	r.cmd = exec.Command(program, "--port", "0", "--unixsocket", socket, "--save", "", "--appendonly", "no",
		"--dir", dir, "--maxmemory", strconv.FormatInt(maxBytes, 10), "--daemonize", "no")
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	go func() { // owner: r; ends with the server; locked for the reason given at Daemon.launch
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := r.cmd.Start()
		started <- err
		if err == nil {
			_ = r.cmd.Wait() // it ends by our kill
			close(r.exited)
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start redis-server: %w", err)
	}
	if err := r.connect(ctx, socket); err != nil {
		r.close()
		return nil, err
	}
	return r, nil
}

func (r *redis) connect(ctx context.Context, socket string) error {
	ctx, cancel := context.WithTimeout(ctx, redisReady)
	defer cancel()
	for {
		conn, err := new(net.Dialer).DialContext(ctx, "unix", socket)
		if err == nil {
			r.conn = conn
			r.in, r.out = bufio.NewReaderSize(conn, 1<<20), bufio.NewWriterSize(conn, 64<<10)
			return nil
		}
		select {
		case <-r.exited:
			return fmt.Errorf("redis-server ended: %w", err)
		case <-ctx.Done():
			return fmt.Errorf("redis-server does not answer: %w", err)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func (r *redis) close() {
	if r.conn != nil {
		r.conn.Close() //nolint:errcheck // the server is killed
	}
	_ = r.cmd.Process.Signal(os.Kill)
	<-r.exited
}

func (r *redis) command(args ...[]byte) {
	fmt.Fprintf(r.out, "*%d\r\n", len(args))
	for _, a := range args {
		fmt.Fprintf(r.out, "$%d\r\n", len(a))
		r.out.Write(a)            //nolint:errcheck // bufio keeps the error for Flush
		r.out.WriteString("\r\n") //nolint:errcheck // as above
	}
}

// set stores one value.
func (r *redis) set(key, value []byte) error {
	r.command([]byte("SET"), key, value)
	if err := r.out.Flush(); err != nil {
		return err
	}
	line, err := r.in.ReadSlice('\n')
	if err == nil && !bytes.Equal(line, []byte("+OK\r\n")) {
		err = fmt.Errorf("redis SET: %q", line)
	}
	return err
}

// get reads the values of keys into dst, one after another, with at most depth
// GETs on their way at a time.
func (r *redis) get(keys [][]byte, dst []byte, depth int) error {
	for sent, got := 0, 0; got < len(keys); got++ {
		for ; sent < len(keys) && sent < got+depth; sent++ {
			r.command([]byte("GET"), keys[sent])
		}
		if err := r.out.Flush(); err != nil {
			return err
		}
		n, err := r.value(dst)
		if err != nil {
			return err
		}
		dst = dst[n:]
	}
	return nil
}

// value reads one bulk reply into the beginning of dst.
func (r *redis) value(dst []byte) (int, error) {
	line, err := r.in.ReadSlice('\n')
	if err != nil {
		return 0, err
	}
	n, err := strconv.Atoi(string(bytes.TrimSpace(bytes.TrimPrefix(line, []byte("$")))))
	if err != nil || line[0] != '$' || n < 0 || n > len(dst) {
		return 0, fmt.Errorf("redis GET: reply %q for a buffer of %d bytes", line, len(dst))
	}
	if _, err := io.ReadFull(r.in, dst[:n]); err != nil {
		return 0, err
	}
	_, err = r.in.Discard(2)
	return n, err
}
