package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/paging/shm"
	"github.com/kvtier/kvtier/server/rpc"
	"github.com/kvtier/kvtier/tier"
)

// RAM is the arena that a node hands out: what package tier wants of it, and the
// descriptors of its memory.
type RAM interface {
	tier.Arena
	// MaxPageBytes is the longest page that it can hold.
	MaxPageBytes() int64
	// Extents lists the memory of a tenant. The descriptors stay valid while a
	// process of the tenant is counted by Tethered.
	Extents(tenant string) []shm.Extent
	// Tethered counts the processes that may have mapped a tenant's memory: it is
	// given to no other tenant meanwhile.
	Tethered(tenant string, change int)
	// SetAside takes bytes of the budget for memory that lies elsewhere:
	// paging.ErrNoSpace at once. GiveBack returns them.
	SetAside(bytes int64) error
	GiveBack(bytes int64)
}

// Drivers open the tiers; whoever starts a node chooses them. A node closes what
// they return.
type Drivers struct {
	// RAM opens the arena. added is to be called, from any goroutine and not under
	// a lock of the arena, when a tenant got memory. Required.
	RAM func(ctx context.Context, cfg Config, log *slog.Logger, added func(tenant string)) (RAM, error)
	// HBM opens the tier on a device, before RAM is opened; it is closed after RAM.
	// Called if Config.HBMBytes is not 0.
	HBM func(ctx context.Context, cfg Config, log *slog.Logger, added func(tenant string)) (HBM, error)
	// NVMe opens the disk tier in a directory of its own. Called if
	// Config.NVMeBytes is not 0.
	NVMe func(ctx context.Context, cfg Config, dir string, log *slog.Logger) (tier.Durable, error)
}

// Options are what a node gets beside its configuration.
type Options struct {
	Drivers Drivers
	Logger  *slog.Logger // state changes only; nil: none
	Version string       // of the program, for status
	// Progress is told how far the index is loaded at Open. nil: nobody is.
	Progress func(done, about int64)
}

// Server is a node: Open acquires everything, Serve serves until its context
// ends, Close gives everything back.
type Server struct {
	node    *node
	rpc     *rpc.Server
	dir     *dataDir
	tracing *tracing
	http    *httpFace
	handoff *shm.Listener
	unix    *unixSocket
	tcp     net.Listener

	closing  sync.Once
	closeErr error
	closed   chan struct{}
}

// Open validates cfg, then acquires everything a node needs and loads its index,
// which ctx bounds. Clients can connect, and are served once Serve runs. On an
// error everything was released.
func Open(ctx context.Context, cfg Config, o Options) (_ *Server, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.WithDefaults()
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Server{closed: make(chan struct{})}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.release(context.WithoutCancel(ctx)))
		}
	}()
	if s.dir, err = openDir(cfg.Dir); err != nil {
		return nil, err
	}
	record, err := readCluster(cfg.Dir)
	if err != nil {
		return nil, err
	}
	if err := s.openNode(ctx, cfg, o, record != nil || cfg.clustered()); err != nil {
		return nil, err
	}
	if err := s.dir.raise(); err != nil {
		return nil, err
	}
	s.node.identity = s.dir.identity
	if err := s.openListeners(ctx, record); err != nil {
		return nil, err
	}
	if err := s.openFaces(ctx); err != nil {
		return nil, err
	}
	return s, nil
}

// openNode opens the tiers and what holds them together.
func (s *Server) openNode(ctx context.Context, cfg Config, o Options, clustered bool) (err error) {
	n := &node{cfg: cfg, log: o.Logger, version: o.Version, started: time.Now()}
	n.attachments.max = cfg.MaxAttachments
	n.leaseIDs.Store(randomLease())
	n.ctx, n.cancel = context.WithCancel(context.WithoutCancel(ctx))
	n.intake, n.endIntake = context.WithCancel(n.ctx)
	s.node = n
	if cfg.HBMBytes > 0 {
		if o.Drivers.HBM == nil {
			return fmt.Errorf("hbm: this program has no driver for a device: set hbm to 0: %w", paging.ErrInvalid)
		}
		if n.hbm, err = o.Drivers.HBM(ctx, cfg, o.Logger, n.extentsAdded); err != nil {
			n.hbm = nil // not an interface that holds nothing
			return fmt.Errorf("hbm tier: %w", err)
		}
	}
	if n.ram, err = o.Drivers.RAM(ctx, cfg, o.Logger, n.extentsAdded); err != nil {
		return fmt.Errorf("ram tier: %w", err)
	}
	if cfg.NVMeBytes > 0 {
		if o.Drivers.NVMe == nil {
			return fmt.Errorf("nvme: this program has no driver for a disk tier: set nvme to 0: %w", paging.ErrInvalid)
		}
		if n.nvme, err = o.Drivers.NVMe(ctx, cfg, s.dir.sub(nvmeDir), o.Logger); err != nil {
			return fmt.Errorf("nvme tier: %w", err)
		}
	}
	conf := tier.Config{
		Arena: n.ram, Durable: n.nvme, RAMPolicy: cfg.Policy, DiskPolicy: cfg.Policy, Quotas: quotas(cfg.Tenants),
		MaxPageBytes: n.ram.MaxPageBytes(), FlushAfter: cfg.FlushAfter, Logger: o.Logger, Progress: o.Progress,
	}
	if n.hbm != nil {
		conf.Device = n.hbm
	}
	if clustered {
		n.peers = &latePeers{}
		conf.Peers, conf.Observed = n.peers, true
	}
	if n.hier, err = tier.Open(ctx, conf); err != nil {
		return fmt.Errorf("tiers: %w", err)
	}
	return nil
}

func quotas(tenants []Tenant) map[string]tier.Quota {
	q := make(map[string]tier.Quota, len(tenants))
	for _, t := range tenants {
		q[t.Name] = tier.Quota{RAMBytes: int64(t.RAMBytes), DiskBytes: int64(t.NVMeBytes), DeviceBytes: int64(t.HBMBytes)}
	}
	return q
}

func accounts(tenants []Tenant) []rpc.Account {
	out := make([]rpc.Account, 0, len(tenants))
	for _, t := range tenants {
		a := rpc.Account{Tenant: t.Name, UIDs: t.UIDs}
		for _, tok := range t.Tokens {
			role, _ := rpc.ParseRole(tok.Role) // Validate has seen it
			a.Tokens = append(a.Tokens, rpc.Token{Secret: tok.Secret, Role: role})
		}
		out = append(out, a)
	}
	return out
}

// openListeners opens what other machines use, and makes the node one of its
// cluster.
func (s *Server) openListeners(ctx context.Context, record *clusterRecord) (err error) {
	n := s.node
	if n.trust, err = n.cfg.TLS.open(n.log); err != nil {
		return fmt.Errorf("tls: %w", err)
	}
	if n.cfg.Listen != Off {
		if s.tcp, err = listenTCP(ctx, n.cfg.Listen); err != nil {
			return fmt.Errorf("listen: %w", err)
		}
	}
	return s.openCluster(ctx, record)
}

// openFaces makes the services and their sockets.
func (s *Server) openFaces(ctx context.Context) (err error) {
	n := s.node
	cfg := &n.cfg
	if s.tracing, err = openTracing(ctx, cfg.OTLPEndpoint, n.identity, n.log); err != nil {
		return err
	}
	gid, err := socketGroup(cfg.SocketGroup)
	if err != nil {
		return err
	}
	n.accounts = rpc.NewAccounts(accounts(cfg.Tenants), owner())
	conf := rpc.Config{
		Node: n, Admin: &admin{node: n}, Accounts: n.accounts,
		Stats: s.tracing.handler(), MaxCallsInFlight: cfg.MaxCallsInFlight, MaxStreamsPerConn: uint32(cfg.MaxCallsInFlight),
	}
	if n.trust != nil {
		conf.TLS, conf.Identify = n.trust.Server(cfg.TLS.ClientAuth), holder(n.trust)
	}
	s.rpc = rpc.New(conf)
	n.rpcMetrics = s.rpc.Metrics
	if s.unix, err = listenUnix(cfg.Socket, gid); err != nil {
		return err
	}
	if s.handoff, err = shm.ListenHandoff(cfg.HandoffSocket, socketMode, gid); err != nil { //nolint:contextcheck // does not wait
		return err
	}
	if cfg.HTTPListen != Off {
		l, err := listenTCP(ctx, cfg.HTTPListen)
		if err != nil {
			return fmt.Errorf("http-listen: %w", err)
		}
		s.http = newHTTP(l, n)
	}
	return nil
}

// Addr is the address of the TCP listener; nil: there is none.
func (s *Server) Addr() net.Addr {
	if s.tcp == nil {
		return nil
	}
	return s.tcp.Addr()
}

// HTTPAddr is the address of the HTTP listener; nil: there is none.
func (s *Server) HTTPAddr() net.Addr {
	if s.http == nil {
		return nil
	}
	return s.http.listener.Addr()
}

// PeerAddr is where other nodes reach this one; "": it is alone.
func (s *Server) PeerAddr() string {
	if s.node.cluster == nil {
		return ""
	}
	return s.node.cluster.PeerAddress()
}

// GossipAddr is where gossip of other nodes reaches this one; "": it is alone.
func (s *Server) GossipAddr() string {
	if s.node.cluster == nil {
		return ""
	}
	return s.node.cluster.Members().Address()
}

// Socket is the path of the gRPC unix socket.
func (s *Server) Socket() string { return s.node.cfg.Socket }

// Metrics reads the counters of the node.
func (s *Server) Metrics() Metrics { return s.node.metrics() }

// Serve serves until ctx ends or a listener fails, then closes the node. nil
// after an orderly stop; it returns when nothing of the node is left.
func (s *Server) Serve(ctx context.Context) error {
	n := s.node
	failed := make(chan error, 4)
	serve := func(what string, f func() error) { // owner: this call; exits with its listener; bound: four
		n.workers.Go(func() {
			if err := f(); err != nil {
				failed <- fmt.Errorf("%s: %w", what, err)
			}
		})
	}
	serve("unix socket", func() error { return s.rpc.Serve(s.unix) })
	if s.tcp != nil {
		serve("tcp listener", func() error { return s.rpc.Serve(s.tcp) })
	}
	if s.http != nil {
		serve("http listener", s.http.serve)
	}
	n.workers.Go(func() { n.acceptTethers(s.handoff) }) //nolint:contextcheck // bounded by the life of the node
	n.workers.Go(n.sweep)
	s.rpc.SetServing(true)
	n.log.Info("node serves", "node", shortID(n.identity.node), "incarnation", n.identity.incarnation, "socket", n.cfg.Socket)
	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
	case <-s.closed:
	}
	return errors.Join(err, s.Close()) //nolint:contextcheck // ctx has ended: a stop has its own bound
}

// stopGrace is what Close may take beyond Config.StopWithin to give back what a
// node has: a disk that answers needs far less.
const stopGrace = 2 * time.Second

// Close stops the node within Config.StopWithin: intake first, then what runs,
// then what is only in RAM is written down, hottest first. Engines are told.
// Calls that wait get ErrUnavailable. Idempotent; an error says what was not
// given back. Where a disk does not answer, Close returns an error (ErrIO) within
// stopGrace after that time: only the end of the process gives back the rest.
func (s *Server) Close() error {
	s.closing.Do(func() {
		n := s.node
		ctx, cancel := context.WithTimeout(context.Background(), n.cfg.StopWithin)
		defer cancel()
		n.log.Info("node stops", "within", n.cfg.StopWithin)
		n.stopping.Store(true)
		n.endIntake()
		s.rpc.SetServing(false)
		n.attachments.close()
		for _, a := range n.attachments.all() {
			a.stopping(n.cfg.StopWithin)
			a.end(errStopping)
		}
		s.closeErr = s.stopWithin(ctx, n.cfg.StopWithin)
		n.log.Info("node stopped")
		close(s.closed)
	})
	<-s.closed
	return s.closeErr
}

// stopShare of the time for a stop is given to running calls; the rest is for
// writing pages down.
const stopShare = 4

// stopWithin ends the calls and gives everything back, but does not wait longer
// than stopGrace after ctx, which ends within, has ended.
func (s *Server) stopWithin(ctx context.Context, within time.Duration) error {
	released := make(chan error, 1)
	go func() { // owner: Close; exits with what it waits for, or with the process; bound: 1
		calls, stopCalls := context.WithTimeout(ctx, within/stopShare)
		s.rpc.Stop(calls)
		stopCalls()
		released <- s.release(ctx)
	}()
	select {
	case err := <-released:
		return err
	case <-ctx.Done():
	}
	grace := time.NewTimer(stopGrace)
	defer grace.Stop()
	select {
	case err := <-released:
		return err
	case <-grace.C:
		return fmt.Errorf("the node did not stop within %v and %v more, its disk may not answer: end the process: %w", within, stopGrace, paging.ErrIO)
	}
}

// release gives back, in reverse order, everything that was acquired.
func (s *Server) release(ctx context.Context) error {
	var errs []error
	add := func(what string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", what, err))
		}
	}
	if s.http != nil {
		add("http", s.http.close(ctx))
	}
	if s.tcp != nil {
		if err := s.tcp.Close(); !errors.Is(err, net.ErrClosed) {
			add("tcp listener", err)
		}
	}
	if s.handoff != nil {
		add("hand-off socket", s.handoff.Close())
	}
	if s.unix != nil {
		add("socket", s.unix.Close())
	}
	if s.rpc != nil {
		s.rpc.Stop(ctx)
	}
	if s.node != nil {
		errs = append(errs, s.node.close(ctx))
	}
	s.tracing.close(ctx)
	if s.dir != nil {
		s.dir.close()
	}
	return errors.Join(errs...)
}

// close gives back the tiers and what holds them together.
func (n *node) close(ctx context.Context) error {
	n.cancel()
	n.workers.Wait()
	var errs []error
	if n.plans != nil {
		n.plans.Close()
	}
	if n.sessions != nil {
		n.sessions.Close()
	}
	if n.cluster != nil {
		errs = append(errs, n.cluster.Close())
	}
	if n.names != nil {
		errs = append(errs, n.names.Close())
	}
	for _, a := range n.attachments.all() {
		a.discard()
	}
	if n.hier != nil {
		errs = append(errs, n.hier.Close(ctx))
	}
	if n.nvme != nil {
		errs = append(errs, n.nvme.Close())
	}
	if n.ram != nil {
		errs = append(errs, n.ram.Close())
	}
	if n.hbm != nil {
		errs = append(errs, n.hbm.Close())
	}
	return errors.Join(errs...)
}
