package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// DirectoryConfig describes "bench directory".
type DirectoryConfig struct {
	Claims    int64 // preloaded
	More      int64 // claimed while the rate is measured, then released
	Sights    int   // claims of which it is measured when another node sees them
	Failovers int   // leaders killed
	// Within bounds the time until all nodes have applied what was claimed. 0: 30 s.
	Within   time.Duration
	Program  string // of the processes; empty: the running one
	TempDir  string
	Progress Progress
}

const directoryNodes = 3

// logBytesPerClaim is what a claim takes in the logs of one node, with room for
// what is written again after a restart.
const logBytesPerClaim = 40

// Directory runs a directory of three processes whose logs are synced at each
// commit, and measures it: see DirectoryReport.
func Directory(ctx context.Context, cfg DirectoryConfig) (_ *DirectoryReport, err error) {
	work, err := NewWorkspace(cfg.TempDir, directoryNodes*logBytesPerClaim*(cfg.Claims+3*cfg.More))
	if err != nil {
		return nil, err
	}
	b := &directoryRun{cfg: &cfg, dir: work.Dir}
	defer func() { b.close(); err = errors.Join(err, work.Close()) }()
	for _, stage := range []func(context.Context) error{b.start, b.preload, b.measure, b.watch, b.failover} {
		if err := stage(ctx); err != nil {
			return nil, err
		}
	}
	return &b.rep, nil
}

// directoryRun is one run. One goroutine uses it.
type directoryRun struct {
	cfg   *DirectoryConfig
	dir   string
	nodes [directoryNodes]*replicaProcess
	held  [directoryNodes]int64
	empty [directoryNodes]int64 // heap before there were claims
	rep   DirectoryReport
}

func (b *directoryRun) total() (n int64) {
	for _, held := range b.held {
		n += held
	}
	return n
}

func (b *directoryRun) step(done int64) {
	if b.cfg.Progress != nil {
		b.cfg.Progress(done, 5)
	}
}

// replicaProcess is one process and the pipes to it. One order at a time.
type replicaProcess struct {
	cmd         *exec.Cmd
	in          io.WriteCloser
	out         *bufio.Scanner
	log         *os.File
	exited      chan struct{}
	address     string
	incarnation int
}

func (b *directoryRun) launch(i int) error {
	old := b.nodes[i]
	p := &replicaProcess{exited: make(chan struct{}), incarnation: 1}
	if old != nil {
		p.incarnation = old.incarnation + 1
	}
	program := b.cfg.Program
	if program == "" {
		var err error
		if program, err = os.Executable(); err != nil {
			return fmt.Errorf("find the kvtier program: %w", err)
		}
	}
	dir := filepath.Join(b.dir, strconv.Itoa(i+1))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	var err error
	if p.log, err = os.OpenFile(filepath.Join(dir, "log.txt"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600); err != nil {
		return err
	}
	p.cmd = exec.Command(program, "bench", "directory-replica", "--node", strconv.Itoa(i+1), "--dir", filepath.Join(dir, "raft"),
		"--incarnation", strconv.Itoa(p.incarnation), "--held", strconv.FormatInt(b.held[i], 10),
		"--max-claims", strconv.FormatInt(2*(b.cfg.Claims+b.cfg.More)+1<<20, 10))
	p.cmd.Env = cleanEnv(os.Environ())
	p.cmd.Stderr = p.log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return err
	}
	// A pipe of our own: the one of exec is closed by Wait, perhaps before the
	// last answer was read.
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	p.cmd.Stdout = w
	if err := launch(p.cmd, func(error) { close(p.exited) }); err != nil {
		return errors.Join(fmt.Errorf("start %s: %w", program, err), r.Close(), w.Close(), p.log.Close())
	}
	b.nodes[i] = p
	p.out = bufio.NewScanner(r)
	if err := w.Close(); err != nil {
		return err
	}
	a, err := p.answer()
	p.address = a.Address
	return err
}

// answer reads one answer. It ends with the process at the latest.
func (p *replicaProcess) answer() (a answer, err error) {
	if !p.out.Scan() {
		tail, _ := os.ReadFile(p.log.Name())
		return a, fmt.Errorf("a process of the directory ended: %w\n%s", errors.Join(p.out.Err(), io.ErrUnexpectedEOF), tail[max(0, len(tail)-2000):])
	}
	if err := json.Unmarshal(p.out.Bytes(), &a); err != nil {
		return a, err
	}
	if a.Error != "" {
		err = errors.New(a.Error)
	}
	return a, err
}

func (p *replicaProcess) do(o *order) (answer, error) {
	b, err := json.Marshal(o)
	if err == nil {
		_, err = p.in.Write(append(b, '\n'))
	}
	if err != nil {
		return answer{}, fmt.Errorf("order to a process of the directory: %w", err)
	}
	a, err := p.answer()
	if err != nil {
		err = fmt.Errorf("%s: %w", o.Do, err)
	}
	return a, err
}

func (p *replicaProcess) kill() {
	_ = p.cmd.Process.Kill() // gone already is what is wanted
	<-p.exited
	p.in.Close()
	p.log.Close()
}

func (b *directoryRun) close() {
	for _, p := range b.nodes {
		if p != nil {
			p.kill()
		}
	}
}

// all gives each node an order at the same time, and returns their answers.
func (b *directoryRun) all(ctx context.Context, order func(i int) *order) ([]answer, error) {
	answers := make([]answer, len(b.nodes))
	errs := make([]error, len(b.nodes))
	stop := context.AfterFunc(ctx, func() { // what they wait for ends with them
		for _, p := range b.nodes {
			_ = p.cmd.Process.Kill()
		}
	})
	defer stop()
	var wait sync.WaitGroup
	for i, p := range b.nodes {
		if o := order(i); o != nil {
			wait.Go(func() { answers[i], errs[i] = p.do(o) })
		}
	}
	wait.Wait()
	return answers, errors.Join(errors.Join(errs...), ctx.Err())
}

func same(o order) func(int) *order { return func(int) *order { return &o } }

func (b *directoryRun) tellAddresses(ctx context.Context) error {
	at := map[int]string{}
	for i, p := range b.nodes {
		at[i+1] = p.address
	}
	_, err := b.all(ctx, same(order{Do: "peers", Addresses: at}))
	return err
}

// start makes a cluster of three voters.
func (b *directoryRun) start(ctx context.Context) error {
	for i := range b.nodes {
		if err := b.launch(i); err != nil {
			return err
		}
	}
	if err := b.tellAddresses(ctx); err != nil {
		return err
	}
	for _, o := range []order{{Do: "open"}, {Do: "ready"}} {
		if _, err := b.all(ctx, same(o)); err != nil {
			return err
		}
	}
	if err := b.voters(ctx); err != nil {
		return err
	}
	memory, err := b.all(ctx, same(order{Do: "memory"}))
	for i, a := range memory {
		b.empty[i] = a.HeapBytes
	}
	b.step(1)
	return err
}

const votersWithin = 20 * time.Second

// voters waits until all three vote.
func (b *directoryRun) voters(ctx context.Context) error {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(votersWithin); ; {
		answers, err := b.all(ctx, same(order{Do: "leader"}))
		if err != nil {
			return err
		}
		agree := 0
		for _, a := range answers {
			if a.Leader == answers[0].Leader && a.Leader > 0 && a.Count == directoryNodes {
				agree++
			}
		}
		if agree == directoryNodes {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("no %d voters within %v", directoryNodes, votersWithin)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// claim lets each node claim its share of n blocks, or release it, and returns
// the time until all nodes have applied all.
func (b *directoryRun) claim(ctx context.Context, n int64) (time.Duration, error) {
	do, share := "claim", func(i int) int64 { return n/directoryNodes + min(1, max(0, n%directoryNodes-int64(i))) }
	if n < 0 {
		do, n = "release", -n
	}
	answers, err := b.all(ctx, func(i int) *order { return &order{Do: do, Count: share(i)} })
	if err != nil {
		return 0, err
	}
	first := answers[0].From
	for i, a := range answers {
		b.held[i] = a.Count
		first = min(first, a.From)
	}
	answers, err = b.all(ctx, same(order{Do: "await", Count: b.total(), Within: b.cfg.Within}))
	var last int64
	for _, a := range answers {
		last = max(last, a.To)
		if err != nil {
			b.rep.WrongClaims += max(a.Count-b.total(), b.total()-a.Count)
		}
	}
	if err != nil && b.rep.WrongClaims > 0 && ctx.Err() == nil {
		err = nil // the report tells
	}
	return time.Duration(last - first), err
}

func (b *directoryRun) preload(ctx context.Context) error {
	took, err := b.claim(ctx, b.cfg.Claims)
	if err != nil {
		return err
	}
	b.rep.Preloaded, b.rep.PreloadS = b.cfg.Claims, took.Seconds()
	b.step(2)
	return nil
}

// measure takes the rate of claims, the pauses meanwhile, lookups and memory, and
// releases what was claimed for it.
func (b *directoryRun) measure(ctx context.Context) error {
	if _, err := b.all(ctx, same(order{Do: "memory"})); err != nil { // the pauses from now on
		return err
	}
	took, err := b.claim(ctx, b.cfg.More)
	if err != nil {
		return err
	}
	b.rep.Claimed, b.rep.ClaimsPerS = b.cfg.More, float64(b.cfg.More)/took.Seconds()
	paused, err := b.all(ctx, same(order{Do: "memory"}))
	if err != nil {
		return err
	}
	for _, a := range paused {
		if len(a.Pauses) == 4 {
			b.rep.GCPauseUS.P50 = max(b.rep.GCPauseUS.P50, a.Pauses[0])
			b.rep.GCPauseUS.P95 = max(b.rep.GCPauseUS.P95, a.Pauses[1])
			b.rep.GCPauseUS.P99 = max(b.rep.GCPauseUS.P99, a.Pauses[2])
			b.rep.GCPauseUS.Max = max(b.rep.GCPauseUS.Max, a.Pauses[3])
		}
	}
	if _, err := b.nodes[0].do(&order{Do: "settle"}); err != nil {
		return err
	}
	for i, p := range b.nodes { // one after another: each alone on the machine
		a, err := p.do(&order{Do: "lookup", Held: b.held[:]})
		if err != nil {
			return err
		}
		b.rep.WrongClaims += a.Count
		if i == 0 || a.Latency[0].P50 > b.rep.Lookup512US.P50 {
			b.rep.Lookup512US = a.Latency[0]
		}
		if a, err = p.do(&order{Do: "memory"}); err != nil {
			return err
		}
		b.rep.HeapBytes = max(b.rep.HeapBytes, a.HeapBytes)
		b.rep.BytesPerClaim = max(b.rep.BytesPerClaim, float64(a.HeapBytes-b.empty[i])/float64(a.Count))
	}
	if _, err := b.claim(ctx, -b.cfg.More); err != nil {
		return err
	}
	b.step(3)
	return nil
}

// watch measures the time from a claim on one node to its sight on another.
func (b *directoryRun) watch(ctx context.Context) error {
	var took Latency
	for n := range b.cfg.Sights {
		from, to := n%directoryNodes, (n+1+n/directoryNodes%2)%directoryNodes
		key := b.held[from]
		answers, err := b.all(ctx, func(i int) *order {
			switch i {
			case from:
				return &order{Do: "put"}
			case to:
				return &order{Do: "see", Node: from + 1, Key: key}
			}
			return nil
		})
		if err != nil {
			return err
		}
		b.held[from]++
		took.Add(time.Duration(answers[to].To - answers[from].From))
	}
	b.rep.VisibleMS = millis(took.Quantiles())
	b.step(4)
	return nil
}

// millis makes microseconds milliseconds.
func millis(q Quantiles) Quantiles {
	return Quantiles{P50: q.P50 / 1e3, P95: q.P95 / 1e3, P99: q.P99 / 1e3, Max: q.Max / 1e3}
}

// failover kills leaders, and measures the time until a claim of another node is
// committed. Each comes back and catches up before the next one goes.
func (b *directoryRun) failover(ctx context.Context) error {
	var took Latency
	for range b.cfg.Failovers {
		a, err := b.nodes[0].do(&order{Do: "leader"})
		if err != nil {
			return err
		}
		if a.Leader < 1 || a.Leader > directoryNodes {
			return errors.New("the directory has no leader")
		}
		leader := a.Leader - 1
		other := (leader + 1) % directoryNodes
		killed := time.Now()
		b.nodes[leader].kill()
		if a, err = b.nodes[other].do(&order{Do: "put"}); err != nil {
			return err
		}
		b.held[other]++
		took.Add(time.Duration(a.To - killed.UnixNano()))
		if err := b.restart(ctx, leader); err != nil {
			return err
		}
	}
	b.rep.FailoverMS = millis(took.Quantiles()).Max
	b.rep.Failovers = b.cfg.Failovers
	b.step(5)
	return nil
}

func (b *directoryRun) restart(ctx context.Context, i int) error {
	if err := b.launch(i); err != nil {
		return err
	}
	if err := b.tellAddresses(ctx); err != nil {
		return err
	}
	for _, o := range []order{{Do: "open"}, {Do: "ready"}} {
		if _, err := b.nodes[i].do(&o); err != nil {
			return err
		}
	}
	answers, err := b.all(ctx, same(order{Do: "await", Count: b.total(), Within: b.cfg.Within}))
	if err != nil && ctx.Err() == nil {
		for _, a := range answers {
			b.rep.WrongClaims += max(a.Count-b.total(), b.total()-a.Count)
		}
		if b.rep.WrongClaims > 0 {
			return nil // the report tells
		}
	}
	return errors.Join(err, b.voters(ctx))
}

// DirectoryReport is the answer of "bench directory": three processes on this
// machine, every commit synced to the logs of two of them.
type DirectoryReport struct {
	Preloaded     int64     `json:"preloaded"` // claims
	PreloadS      float64   `json:"preload_s"`
	Claimed       int64     `json:"claimed"`         // more, while the rate was measured
	ClaimsPerS    float64   `json:"claims_per_s"`    // until all three have applied all
	Lookup512US   Quantiles `json:"lookup512_us"`    // 512 random present blocks, of the slowest node
	BytesPerClaim float64   `json:"bytes_per_claim"` // of heap, of the largest node
	HeapBytes     int64     `json:"heap_bytes"`
	VisibleMS     Quantiles `json:"visible_ms"`   // claim on one node to sight on another, in milliseconds
	FailoverMS    float64   `json:"failover_ms"`  // kill of the leader to a commit elsewhere, the worst, in milliseconds
	Failovers     int       `json:"failovers"`    // leaders killed
	GCPauseUS     Quantiles `json:"gc_pause_us"`  // while claims are made, of the worst node
	WrongClaims   int64     `json:"wrong_claims"` // missing, or there although they were released
}

// Rows implements Report.
func (r *DirectoryReport) Rows() []Row {
	ms := func(q Quantiles) string {
		return Quantiles{P50: q.P50 * 1e3, P95: q.P95 * 1e3, P99: q.P99 * 1e3, Max: q.Max * 1e3}.String()
	}
	return []Row{
		{"claims preloaded", fmt.Sprint(r.Preloaded), fmt.Sprintf("in %.1f s", r.PreloadS)},
		{"claims a second", fmt.Sprintf("%.0f", r.ClaimsPerS), fmt.Sprintf("%d more, applied by all three; goal at least 300000", r.Claimed)},
		{"lookup of 512", r.Lookup512US.String(), "random present blocks; goal p50 at most 100 us"},
		{"memory per claim", fmt.Sprintf("%.1f B", r.BytesPerClaim), fmt.Sprintf("of a heap of %s; goal at most 64 B", FormatBytes(r.HeapBytes))},
		{"visible elsewhere", ms(r.VisibleMS), "goal p99 at most 50 ms"},
		{"leader killed", fmt.Sprintf("%.0f ms", r.FailoverMS), fmt.Sprintf("to a commit, the worst of %d; goal at most 2 s", r.Failovers)},
		{"pauses of the collector", fmt.Sprintf("p50 %s  p99 %s  max %s", micros(r.GCPauseUS.P50), micros(r.GCPauseUS.P99), micros(r.GCPauseUS.Max)), "goal p99 below 1 ms"},
		{"wrong claims", fmt.Sprint(r.WrongClaims), "must be 0"},
	}
}

// Err implements Report.
func (r *DirectoryReport) Err() error {
	if r.WrongClaims != 0 {
		return fmt.Errorf("%d wrong claims", r.WrongClaims)
	}
	return nil
}
