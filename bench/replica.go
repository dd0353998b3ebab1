package bench

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"runtime"
	"runtime/metrics"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/server/placement"
	"github.com/kvtier/kvtier/server/transport"
)

// ReplicaConfig describes one process of "bench directory".
type ReplicaConfig struct {
	Node        int    // 1, 2, 3
	Dir         string // of its log; kept over restarts
	Incarnation uint64
	Held        int64 // claims that it made in earlier incarnations
	MaxClaims   int64
}

// order is what the parent asks of a replica, one JSON object a line.
type order struct {
	Do        string         `json:"do"`
	Addresses map[int]string `json:"addresses,omitempty"` // peers: of all nodes
	Count     int64          `json:"count,omitempty"`     // claim, release: so many; await: of all nodes
	Node      int            `json:"node,omitempty"`      // see: whose claim
	Key       int64          `json:"key,omitempty"`       // put, see: which
	Held      []int64        `json:"held,omitempty"`      // lookup: claims of each node, from node 1
	Within    time.Duration  `json:"within,omitempty"`    // await: nanoseconds; 0: replicaPatience
}

// answer to an order.
type answer struct {
	Error     string      `json:"error,omitempty"`
	Address   string      `json:"address,omitempty"`
	From      int64       `json:"from,omitempty"` // Unix nanoseconds
	To        int64       `json:"to,omitempty"`
	Count     int64       `json:"count"` // claims here; lookup: blocks not found
	Leader    int         `json:"leader,omitempty"`
	Latency   []Quantiles `json:"latency,omitempty"` // lookup: one
	HeapBytes int64       `json:"heap_bytes,omitempty"`
	Pauses    []float64   `json:"pauses,omitempty"` // memory: p50, p95, p99 and max in microseconds since the order before
}

// How long a replica waits for what it was asked to wait for, and how often it
// looks.
const (
	replicaPatience = 30 * time.Second
	replicaLook     = 200 * time.Microsecond
	replicaPending  = 512 << 10 // claims that wait in the claimer
	lookupKeys      = 512
	lookupRounds    = 4000
)

// benchKey is the key of a node's i-th claim: all nodes can tell it.
func benchKey(node int, i int64) (k placement.BlockKey) {
	x := uint64(i)<<8 | uint64(node)
	mix := func() uint64 { // splitmix64
		x += 0x9e3779b97f4a7c15
		z := (x ^ x>>30) * 0xbf58476d1ce4e5b9
		z = (z ^ z>>27) * 0x94d049bb133111eb
		return z ^ z>>31
	}
	binary.LittleEndian.PutUint64(k[:], mix())
	binary.LittleEndian.PutUint64(k[8:], mix())
	return k
}

func benchNode(node int) placement.NodeID { return placement.NodeID{0: byte(node), 15: 0xbe} }

// replica is one process of "bench directory": the product's directory and
// claimer over the product's peer port.
type replica struct {
	cfg     ReplicaConfig
	mux     *transport.Mux
	pages   *transport.Transport
	dir     *directory.Directory
	claimer *directory.Claimer
	held    atomic.Int64
	pauses  *metrics.Float64Histogram // at the order before

	mu        sync.Mutex
	addresses map[placement.NodeID]string
}

// RunReplica is the process: it does the orders on in until its end, and answers
// each on out.
func RunReplica(ctx context.Context, cfg ReplicaConfig, in io.Reader, out io.Writer) (err error) {
	r := &replica{cfg: cfg, addresses: map[placement.NodeID]string{}}
	r.held.Store(cfg.Held)
	r.mux, err = transport.OpenMux(transport.MuxConfig{ID: benchNode(cfg.Node), Cluster: "bench", Listen: "127.0.0.1:0", Resolve: r.resolve})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	r.pages, err = transport.Open(transport.Config{Mux: r.mux, Source: noPages{}, Answer: r.forwarded})
	if err != nil {
		return err
	}
	enc := json.NewEncoder(out)
	if err := enc.Encode(answer{Address: r.mux.Addr().String()}); err != nil {
		return err
	}
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		var o order
		if err := json.Unmarshal(lines.Bytes(), &o); err != nil {
			return fmt.Errorf("order: %w", err)
		}
		a, err := r.do(ctx, &o)
		if err != nil {
			a.Error = err.Error()
		}
		if err := enc.Encode(a); err != nil {
			return err
		}
	}
	return lines.Err()
}

func (r *replica) close() error {
	var errs []error
	if r.claimer != nil {
		r.claimer.Close()
	}
	if r.dir != nil {
		errs = append(errs, r.dir.Close())
	}
	if r.pages != nil {
		errs = append(errs, r.pages.Close())
	}
	return errors.Join(append(errs, r.mux.Close())...)
}

func (r *replica) resolve(id placement.NodeID) (string, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	a, ok := r.addresses[id]
	return a, ok
}

// Accept implements directory.Peers.
func (r *replica) Accept(ctx context.Context) (net.Conn, error) { return r.mux.Accept(ctx) }

// Dial implements directory.Peers.
func (r *replica) Dial(ctx context.Context, id placement.NodeID) (net.Conn, error) {
	return r.mux.Dial(ctx, id)
}

const methodPropose = 1

// Forward implements directory.Peers.
func (r *replica) Forward(ctx context.Context, leader placement.NodeID, command []byte) (directory.Result, error) {
	b, err := r.pages.Call(ctx, leader, methodPropose, command)
	if err != nil {
		return directory.Invalid, err
	}
	if len(b) != 1 {
		return directory.Invalid, fmt.Errorf("answer of %d bytes: %w", len(b), paging.ErrInvalid)
	}
	return directory.Result(b[0]), nil
}

func (r *replica) forwarded(ctx context.Context, _ placement.NodeID, method uint8, command []byte) ([]byte, error) {
	if method != methodPropose || r.dir == nil {
		return nil, paging.ErrUnavailable
	}
	res, err := r.dir.ProposeHere(ctx, command)
	return []byte{byte(res)}, err
}

// Members implements directory.Peers: all nodes, whether they live or not, so that
// those that live need not choose other voters while one is restarted.
func (r *replica) Members() []placement.Member {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []placement.Member
	for id := range r.addresses {
		out = append(out, placement.Member{ID: id, Seen: true})
	}
	slices.SortFunc(out, func(a, b placement.Member) int { return int(a.ID[0]) - int(b.ID[0]) })
	return out
}

// Held implements directory.Inventory.
func (r *replica) Held(buckets *directory.Buckets, f func(placement.BlockKey, paging.PartSet)) {
	for i := range r.held.Load() {
		k := benchKey(r.cfg.Node, i)
		if b, _ := directory.ClaimDigest(k, 1); buckets[b] {
			f(k, 1)
		}
	}
}

func (r *replica) do(ctx context.Context, o *order) (a answer, err error) {
	switch o.Do {
	case "peers":
		r.mu.Lock()
		defer r.mu.Unlock()
		for node, address := range o.Addresses {
			r.addresses[benchNode(node)] = address
		}
	case "open":
		err = r.open()
	case "ready":
		err = r.until(ctx, "first comparison with the directory", func() bool { return r.claimer.Metrics().Compares > 0 })
	case "claim":
		a, err = r.change(ctx, o.Count)
	case "release":
		a, err = r.change(ctx, -o.Count)
	case "await":
		a, err = r.await(ctx, o.Count, o.Within)
	case "put":
		a, err = r.put(ctx)
	case "see":
		a, err = r.see(ctx, o.Node, o.Key)
	case "lookup":
		a, err = r.lookup(o.Held)
	case "settle":
		err = r.settle(ctx)
	case "memory":
		a = r.memory()
	case "leader":
		leader, ok := r.dir.Leader()
		if ok {
			a.Leader = int(leader[0])
		}
		a.Count = int64(r.dir.Status().Voters)
	default:
		err = fmt.Errorf("order %q: %w", o.Do, paging.ErrInvalid)
	}
	return a, err
}

func (r *replica) open() (err error) {
	cfg := directory.Config{ID: benchNode(r.cfg.Node), Dir: r.cfg.Dir, Peers: r, Bootstrap: r.cfg.Node == 1, MaxClaims: r.cfg.MaxClaims}
	if r.dir, err = directory.Open(cfg); err != nil {
		return err
	}
	id := benchNode(r.cfg.Node)
	r.claimer, err = directory.NewClaimer(directory.ClaimerConfig{
		Directory: r.dir, Inventory: r,
		Self: &kvtierv1.JoinNode{Node: id[:], Incarnation: r.cfg.Incarnation, Name: fmt.Sprint(r.cfg.Node), PeerAddress: r.mux.Addr().String()},
	})
	return err
}

// change claims n more blocks, or releases the last -n. It returns when all are
// on their way: await tells when they are applied.
func (r *replica) change(ctx context.Context, n int64) (a answer, err error) {
	from, parts := r.held.Load(), paging.PartSet(1)
	if n < 0 {
		n, parts = -n, 0
		from -= n
		r.held.Store(from)
	}
	a.From = time.Now().UnixNano()
	for i := from; i < from+n && err == nil; i++ {
		if parts != 0 {
			r.held.Store(i + 1)
		}
		r.claimer.Set(benchKey(r.cfg.Node, i), parts)
		if i%4096 == 0 {
			err = r.until(ctx, "room for claims", func() bool { return r.claimer.Metrics().Pending < replicaPending })
		}
	}
	a.Count = r.held.Load()
	return a, err
}

// until waits for a condition.
func (r *replica) until(ctx context.Context, what string, ok func() bool) error {
	return r.within(ctx, 0, what, ok)
}

func (*replica) within(ctx context.Context, patience time.Duration, what string, ok func() bool) error {
	if ok() {
		return nil
	}
	if patience == 0 {
		patience = replicaPatience
	}
	tick := time.NewTicker(replicaLook)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); !ok(); {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
			if time.Now().After(deadline) {
				return fmt.Errorf("no %s within %v: %w", what, patience, paging.ErrUnavailable)
			}
		}
	}
	return nil
}

func (r *replica) claims() (n int64) {
	r.dir.Read(func(s *directory.State) { n = s.Claims() })
	return n
}

// await waits until exactly so many claims are applied here.
func (r *replica) await(ctx context.Context, n int64, within time.Duration) (answer, error) {
	err := r.within(ctx, within, fmt.Sprintf("%d claims", n), func() bool { return r.claims() == n })
	return answer{To: time.Now().UnixNano(), Count: r.claims()}, err
}

// put claims one more block and waits until it is committed.
func (r *replica) put(ctx context.Context) (a answer, err error) {
	i := r.held.Add(1) - 1
	before := r.claimer.Metrics().Changes
	a.From = time.Now().UnixNano()
	r.claimer.Set(benchKey(r.cfg.Node, i), 1)
	err = r.until(ctx, "commit of a claim", func() bool { return r.claimer.Metrics().Changes > before })
	a.To, a.Count = time.Now().UnixNano(), i
	return a, err
}

// see waits until a claim of another node is in the replica here.
func (r *replica) see(ctx context.Context, node int, key int64) (answer, error) {
	k := []placement.BlockKey{benchKey(node, key)}
	var counts []int
	var holders []directory.Holder
	err := r.until(ctx, "sight of a claim", func() bool {
		counts, holders = r.dir.Locate(k, counts[:0], holders[:0])
		return len(holders) > 0
	})
	return answer{To: time.Now().UnixNano()}, err
}

// lookup asks for random present blocks, again and again.
func (r *replica) lookup(held []int64) (answer, error) {
	var total int64
	for _, n := range held {
		total += n
	}
	if total == 0 {
		return answer{}, fmt.Errorf("lookup of nothing: %w", paging.ErrInvalid)
	}
	random := rand.New(rand.NewPCG(1, uint64(r.cfg.Node)))
	keys := make([]placement.BlockKey, lookupKeys)
	var counts []int
	var holders []directory.Holder
	var took Latency
	missing := int64(0)
	for range lookupRounds {
		for i := range keys {
			at, node := random.Int64N(total), 1
			for at >= held[node-1] {
				at -= held[node-1]
				node++
			}
			keys[i] = benchKey(node, at)
		}
		start := time.Now()
		counts, holders = r.dir.Locate(keys, counts[:0], holders[:0])
		took.Add(time.Since(start))
		for _, n := range counts {
			if n == 0 {
				missing++
			}
		}
	}
	return answer{Latency: []Quantiles{took.Quantiles()}, Count: missing}, nil
}

// settle pushes large entries out of the cache of the log, so that the memory
// that is left is that of the state.
func (r *replica) settle(ctx context.Context) error {
	const entries, callers = 600, 30
	errs := make(chan error, callers)
	for range callers { // owner: this call; bound: callers
		go func() {
			var err error
			for range entries / callers {
				c := &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_Tick{Tick: &kvtierv1.Tick{}}}
				if _, e := r.dir.Propose(ctx, c); e != nil {
					err = e
				}
			}
			errs <- err
		}()
	}
	var all []error
	for range callers {
		all = append(all, <-errs)
	}
	return errors.Join(all...)
}

// memory is the heap, and the pauses since it was asked before.
func (r *replica) memory() (a answer) {
	const pauses = "/sched/pauses/total/gc:seconds"
	sample := []metrics.Sample{{Name: pauses}}
	metrics.Read(sample)
	if sample[0].Value.Kind() == metrics.KindFloat64Histogram {
		now := sample[0].Value.Float64Histogram()
		a.Pauses = pauseQuantiles(now, r.pauses)
		r.pauses = &metrics.Float64Histogram{Counts: slices.Clone(now.Counts), Buckets: now.Buckets}
	}
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	a.HeapBytes = int64(m.HeapAlloc)
	if r.dir != nil {
		a.Count = r.claims()
	}
	return a
}

// pauseQuantiles are p50, p95, p99 and max of what a histogram counted since before,
// in microseconds: the upper end of the bucket.
func pauseQuantiles(now, before *metrics.Float64Histogram) []float64 {
	counts := slices.Clone(now.Counts)
	var total uint64
	for i := range counts {
		if before != nil {
			counts[i] -= before.Counts[i]
		}
		total += counts[i]
	}
	out := make([]float64, 0, 4)
	for _, q := range []float64{.5, .95, .99, 1} {
		need, seen, at := uint64(math.Ceil(q*float64(total))), uint64(0), 0.0
		for i, n := range counts {
			if seen += n; n > 0 && seen >= need {
				at = now.Buckets[i+1]
				if math.IsInf(at, 1) {
					at = now.Buckets[i]
				}
				break
			}
		}
		out = append(out, at*1e6)
	}
	return out
}

// noPages is the source of a process that has no pages.
type noPages struct{}

func (noPages) Open(context.Context, placement.NodeID, *transport.PageRequest) (transport.Pages, error) {
	return nil, paging.ErrUnknownNamespace
}

func (noPages) Have(context.Context, placement.NodeID, *transport.HaveRequest) ([]transport.Held, error) {
	return nil, paging.ErrUnknownNamespace
}

func (noPages) Doubt(placement.NodeID, paging.PageID) {}
