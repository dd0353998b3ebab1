package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/paging"
)

// congestion is what the product sets on its sockets; a bound under another
// algorithm would be a bound of something else.
const congestion = "cubic"

func cubic(_, _ string, c syscall.RawConn) error {
	return c.Control(func(fd uintptr) {
		_ = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, congestion) // advice
	})
}

// tcpCopy is what any transfer of pages is held against: a plain TCP connection
// between two goroutines of this process. The sender writes four pages a call
// straight out of memory, the receiver reads straight into other memory and sums
// it by 64 KiB. One goroutine uses it.
type tcpCopy struct {
	src, dst []byte
	page     int
	sums     []uint64
	conn     net.Conn
	ask      chan struct{}
	done     chan struct{}
}

// anonymous is memory outside the collector's, touched.
func anonymous(bytes int64) ([]byte, error) {
	return unix.Mmap(-1, 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_POPULATE)
}

func newTCPCopy(ctx context.Context, content Content, page, bytes int64) (_ *tcpCopy, err error) {
	t := &tcpCopy{page: int(page), ask: make(chan struct{}), done: make(chan struct{})}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.close())
		}
	}()
	if t.src, err = anonymous(bytes); err != nil {
		return nil, err
	}
	if t.dst, err = anonymous(bytes); err != nil {
		return nil, err
	}
	for at := int64(0); at < bytes; at += page {
		content.Fill(t.src[at:][:page], paging.PageID{Part: int(at / page)})
	}
	for rest := t.src; len(rest) > 0; rest = rest[min(len(rest), paging.ChunkBytes):] {
		t.sums = append(t.sums, xxh3.Hash(rest[:min(len(rest), paging.ChunkBytes)]))
	}
	lc := net.ListenConfig{Control: cubic}
	l, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	go t.send(l) // owner: t; exits at close
	d := net.Dialer{Control: cubic}
	if t.conn, err = d.DialContext(ctx, "tcp", l.Addr().String()); err != nil {
		shut(l)
		<-t.done
		return nil, err
	}
	return t, nil
}

func (t *tcpCopy) send(l net.Listener) {
	defer close(t.done)
	c, err := l.Accept()
	shut(l)
	if err != nil {
		return
	}
	defer shut(c)
	for range t.ask {
		for rest := t.src; len(rest) > 0; {
			var out net.Buffers
			for n := 0; n < 4 && len(rest) > 0; n++ {
				piece := rest[:min(len(rest), t.page)]
				out, rest = append(out, piece), rest[len(piece):]
			}
			if _, err := out.WriteTo(c); err != nil {
				return // the receiver sees the end
			}
		}
	}
}

// shut closes what is done with: its other end has seen what mattered.
func shut(c io.Closer) { c.Close() }

// run copies once.
func (t *tcpCopy) run() error {
	t.ask <- struct{}{}
	for at := 0; at < len(t.dst); at += paging.ChunkBytes {
		chunk := t.dst[at:][:min(len(t.dst)-at, paging.ChunkBytes)]
		for got := 0; got < len(chunk); {
			n, err := t.conn.Read(chunk[got:])
			if err != nil {
				return fmt.Errorf("plain copy: %w", err)
			}
			got += n
		}
		if xxh3.Hash(chunk) != t.sums[at/paging.ChunkBytes] {
			return fmt.Errorf("plain copy at %d: %w", at, paging.ErrCorrupt)
		}
	}
	return nil
}

func (t *tcpCopy) close() error {
	if t.conn != nil {
		close(t.ask)
		shut(t.conn)
		<-t.done
	}
	var errs []error
	for _, m := range [][]byte{t.src, t.dst} {
		if m != nil {
			errs = append(errs, unix.Munmap(m))
		}
	}
	return errors.Join(errs...)
}

// selfCPU is the processor time of this process.
func selfCPU() time.Duration {
	var r unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &r) // cannot fail for oneself
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// clockTick is the unit of /proc/PID/stat on every Linux there is.
const clockTick = time.Second / 100

// cpuOf is the processor time of another process, in ticks of 10 ms.
func cpuOf(pid int) (time.Duration, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	_, after, ok := strings.Cut(string(text), ") ") // the name may hold anything
	fields := strings.Fields(after)
	if !ok || len(fields) < 13 {
		return 0, fmt.Errorf("/proc/%d/stat: %q", pid, text)
	}
	var ticks int64
	for _, f := range fields[11:13] { // utime, stime
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return 0, err
		}
		ticks += n
	}
	return time.Duration(ticks) * clockTick, nil
}

const iperfFor = "1" // second

// iperf measures what iperf3 moves over loopback in a second, with the same
// congestion control; 0 where it is not installed.
func iperf(ctx context.Context) (float64, error) {
	path, err := exec.LookPath("iperf3")
	if err != nil {
		return 0, nil
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	port := strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
	shut(l)
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	server := exec.CommandContext(ctx, path, "-s", "-1", "-B", "127.0.0.1", "-p", port)
	if err := server.Start(); err != nil {
		return 0, fmt.Errorf("iperf3: %w", err)
	}
	defer server.Wait() //nolint:errcheck // ends with the client, or with ctx
	var out []byte
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for tries := 0; ; tries++ { // until it listens
		out, err = exec.CommandContext(ctx, path, "-c", "127.0.0.1", "-p", port, "-t", iperfFor, "-l", "256K", "-C", congestion, "-J").Output()
		if err == nil || tries == 20 || ctx.Err() != nil {
			break
		}
		<-tick.C
	}
	if err != nil {
		cancel()
		return 0, fmt.Errorf("iperf3: %w", err)
	}
	var r struct {
		End struct {
			Received struct {
				BitsPerSecond float64 `json:"bits_per_second"`
			} `json:"sum_received"`
		} `json:"end"`
	}
	if err := json.Unmarshal(out, &r); err != nil {
		return 0, fmt.Errorf("iperf3: %w", err)
	}
	return r.End.Received.BitsPerSecond / 8, nil
}
