package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/paging"
)

// NodeConfig says how a daemon process is started.
type NodeConfig struct {
	// Program is the path of the kvtier binary. Empty: the running one.
	Program string
	// Dir is a directory for its socket, data and log; it stays over restarts.
	Dir string
	// RAM and NVMe are the budgets of the tiers in bytes. NVMe 0: no disk.
	RAM, NVMe int64
	// HBM is the budget of the tier on a host device. 0: none.
	HBM int64
	// Args are further arguments of serve.
	Args []string
	// Env is added to the environment, from which other KVTIER_ variables are
	// taken out: the user's settings are not those of the workload.
	Env []string
}

// readyPrefix starts the line with which serve says that it can be used.
const readyPrefix = "ready "

// maxReady bounds the time from start to ready: memory that the machine has not
// backed yet takes seconds per GiB to touch.
const maxReady = 2 * time.Minute

// Daemon is a node in a process of its own. Safe for concurrent use.
type Daemon struct {
	cfg     NodeConfig
	cmd     *exec.Cmd
	out     *readyWriter
	log     *os.File
	exited  chan struct{} // closed when the process is gone; then exitErr is set
	exitErr error
}

// StartDaemon starts a node and waits until it is ready. The process ends with
// this one, however this one ends. The caller ends it by Stop or Kill.
func StartDaemon(ctx context.Context, cfg NodeConfig) (*Daemon, error) {
	if cfg.Program == "" {
		self, err := os.Executable()
		if err != nil {
			return nil, fmt.Errorf("find the kvtier program: %w", err)
		}
		cfg.Program = self
	}
	log, err := os.OpenFile(filepath.Join(cfg.Dir, "serve.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("log of the node: %w", err)
	}
	d := &Daemon{cfg: cfg, log: log, out: &readyWriter{ready: make(chan struct{})}, exited: make(chan struct{})}
	d.cmd = exec.Command(cfg.Program, d.args()...)
	d.cmd.Env = append(cleanEnv(os.Environ()), cfg.Env...)
	d.cmd.Stdout, d.cmd.Stderr = d.out, log
	// A process group of its own: Ctrl-C at the terminal is for us, and we end it.
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := d.launch(); err != nil {
		log.Close()
		return nil, fmt.Errorf("start %s serve: %w", cfg.Program, err)
	}
	if err := d.awaitReady(ctx); err != nil {
		return nil, errors.Join(err, d.Kill())
	}
	return d, nil
}

func (d *Daemon) args() []string {
	dir := d.cfg.Dir
	args := []string{
		"serve", "--dir", filepath.Join(dir, "data"), "--socket", SocketIn(dir),
		"--ram", strconv.FormatInt(d.cfg.RAM, 10), "--nvme", strconv.FormatInt(d.cfg.NVMe, 10),
	}
	if d.cfg.HBM > 0 {
		args = append(args, "--hbm", strconv.FormatInt(d.cfg.HBM, 10), "--device", "host")
	}
	return append(args, d.cfg.Args...)
}

// SocketIn is the path of the socket of a node that was started in dir.
func SocketIn(dir string) string { return filepath.Join(dir, "kvtier.sock") }

// cleanEnv drops settings of the user; the sabotage switches stay.
func cleanEnv(env []string) []string {
	return slices.DeleteFunc(slices.Clone(env), func(e string) bool {
		return strings.HasPrefix(e, "KVTIER_") && !strings.HasPrefix(e, "KVTIER_SABOTAGE=")
	})
}

func (d *Daemon) launch() error {
	return launch(d.cmd, func(err error) {
		d.exitErr = err
		d.log.Close()
		close(d.exited)
	})
}

// launch starts a process from a thread that lives as long as the process: the
// kernel sends the death signal when the thread that forked ends, and the runtime
// ends threads as it likes (golang/go#27505). ended is told how it ended.
func launch(cmd *exec.Cmd, ended func(error)) error {
	started := make(chan error)
	go func() { // owner: the caller; ends when the process does, which the caller makes sure of
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			ended(cmd.Wait())
		}
	}()
	return <-started
}

func (d *Daemon) awaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, maxReady)
	defer cancel()
	select {
	case <-d.out.ready:
		return nil
	case <-d.exited:
		return fmt.Errorf("the node ended before it was ready: %w\n%s", d.exitErr, d.LogTail())
	case <-ctx.Done():
		return fmt.Errorf("the node was not ready in time: %w\n%s", ctx.Err(), d.LogTail())
	}
}

// Socket is the path of its gRPC socket.
func (d *Daemon) Socket() string { return SocketIn(d.cfg.Dir) }

// Ready is a value of the line with which the node said that it is ready, such
// as "listen". Empty if it has none of that name.
func (d *Daemon) Ready(name string) string {
	for _, field := range strings.Fields(d.out.line()) {
		if value, ok := strings.CutPrefix(field, name+"="); ok {
			return value
		}
	}
	return ""
}

// PID is its process id.
func (d *Daemon) PID() int { return d.cmd.Process.Pid }

// PrivateBytes is the memory of the process that it shares with nobody: all but
// the arenas and the program itself.
func (d *Daemon) PrivateBytes() (int64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.PID()))
	if err != nil {
		return 0, err
	}
	var kib int64
	for line := range lines(text) {
		if _, err := fmt.Sscanf(line, "RssAnon: %d kB", &kib); err == nil {
			return kib << 10, nil
		}
	}
	return 0, errors.New("/proc does not tell the memory of the node")
}

// Exited is closed when the process is gone.
func (d *Daemon) Exited() <-chan struct{} { return d.exited }

// Kill ends the process with SIGKILL and waits until it is gone. A process that
// is gone already is success.
func (d *Daemon) Kill() error {
	err := d.cmd.Process.Kill()
	<-d.exited
	if errors.Is(err, os.ErrProcessDone) {
		err = nil
	}
	return err
}

// Stop asks the process to end, and kills it when ctx ends first. The error
// says how it ended if not with exit code 0.
func (d *Daemon) Stop(ctx context.Context) error {
	if err := d.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return errors.Join(err, d.Kill())
	}
	select {
	case <-d.exited:
		if d.exitErr != nil {
			return fmt.Errorf("the node stopped: %w\n%s", d.exitErr, d.LogTail())
		}
		return nil
	case <-ctx.Done():
		return errors.Join(fmt.Errorf("the node did not stop in time: %w", ctx.Err()), d.Kill())
	}
}

// logTailBytes is what of the log goes into an error: a panic and its stack fit.
const logTailBytes = 8 << 10

// LogTail is the end of its log.
func (d *Daemon) LogTail() string {
	data, err := os.ReadFile(filepath.Join(d.cfg.Dir, "serve.log"))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data[max(0, len(data)-logTailBytes):]))
}

// readyWriter takes what the process prints and notices the ready line. What
// comes after it is dropped.
type readyWriter struct {
	ready chan struct{} // closed at the ready line

	mu    sync.Mutex
	text  []byte
	found string
}

// maxReadyLine bounds what is kept while the line is looked for.
const maxReadyLine = 64 << 10

func (w *readyWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.found != "" || len(w.text) > maxReadyLine {
		return len(p), nil
	}
	w.text = append(w.text, p...)
	for line := range bytes.Lines(w.text) {
		if bytes.HasSuffix(line, []byte("\n")) && bytes.HasPrefix(line, []byte(readyPrefix)) {
			w.found = string(line)
			close(w.ready)
			break
		}
	}
	return len(p), nil
}

func (w *readyWriter) line() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.found
}

// Workspace is a directory for one run that is removed at its end.
type Workspace struct{ Dir string }

// spareBytes is what a workload needs on disk beside its tiers: index and log.
const spareBytes = 64 << 20

// NewWorkspace makes one in parent (empty: the system's place for such things)
// for a workload that keeps so many bytes on disk. ErrNoSpace if they are not
// free there.
func NewWorkspace(parent string, bytes int64) (*Workspace, error) {
	if parent == "" {
		parent = os.TempDir()
	}
	var st unix.Statfs_t
	if err := unix.Statfs(parent, &st); err != nil {
		return nil, fmt.Errorf("working directory in %s: %w", parent, err)
	}
	if free := int64(st.Bavail) * st.Bsize; free < bytes+spareBytes {
		return nil, fmt.Errorf("%s has %s free, this workload needs %s: name another directory by --temp-dir: %w",
			parent, FormatBytes(free), FormatBytes(bytes+spareBytes), paging.ErrNoSpace)
	}
	dir, err := os.MkdirTemp(parent, "kvtier-")
	if err != nil {
		return nil, fmt.Errorf("working directory: %w", err)
	}
	return &Workspace{Dir: dir}, nil
}

// Close removes it with all that is in it.
func (w *Workspace) Close() error { return os.RemoveAll(w.Dir) }
