package directory

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"

	"github.com/kvtier/kvtier/server/placement"
)

// errCut is what a replica that was cut off answers and gets.
var errCut = errors.New("this replica is cut off: its disk does not answer")

// link is Raft's transport to the other replicas, with a switch that cuts it.
// A leader whose log disk hangs goes on sending heartbeats, so that nobody else
// stands for election (hashicorp/raft#503): cutting it off is what makes the
// others elect.
type link struct {
	*raft.NetworkTransport
	cut      atomic.Bool
	consumer chan raft.RPC
	done     chan struct{}
	pump     sync.WaitGroup
}

func newLink(cfg *Config) *link {
	ctx, cancel := context.WithCancel(context.Background())
	layer := &streams{peers: cfg.Peers, ctx: ctx, cancel: cancel, self: cfg.ID, dialed: map[*dialedConn]struct{}{}}
	l := &link{
		NetworkTransport: raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{
			ServerAddressProvider: byID{}, Logger: hclog.NewNullLogger(), Stream: layer,
			MaxPool: connPool, MaxRPCsInFlight: rpcsInFlight, Timeout: rpcTimeout,
		}),
		consumer: make(chan raft.RPC),
		done:     make(chan struct{}),
	}
	l.pump.Go(l.receive) // owner: link; exits at Close
	return l
}

// receive passes on what other replicas ask, unless the link is cut.
func (l *link) receive() {
	for {
		select {
		case rpc := <-l.NetworkTransport.Consumer():
			if l.cut.Load() {
				rpc.Respond(nil, errCut)
				continue
			}
			select {
			case l.consumer <- rpc:
			case <-l.done:
				rpc.Respond(nil, errCut)
				return
			}
		case <-l.done:
			return
		}
	}
}

// Consumer implements raft.Transport.
func (l *link) Consumer() <-chan raft.RPC { return l.consumer }

// SetHeartbeatHandler implements raft.Transport.
func (l *link) SetHeartbeatHandler(handle func(raft.RPC)) {
	l.NetworkTransport.SetHeartbeatHandler(func(rpc raft.RPC) {
		if l.cut.Load() {
			rpc.Respond(nil, errCut)
			return
		}
		handle(rpc)
	})
}

// AppendEntries implements raft.Transport.
func (l *link) AppendEntries(id raft.ServerID, to raft.ServerAddress, args *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse) error {
	if l.cut.Load() {
		return errCut
	}
	return l.NetworkTransport.AppendEntries(id, to, args, resp)
}

// RequestVote implements raft.Transport.
func (l *link) RequestVote(id raft.ServerID, to raft.ServerAddress, args *raft.RequestVoteRequest, resp *raft.RequestVoteResponse) error {
	if l.cut.Load() {
		return errCut
	}
	return l.NetworkTransport.RequestVote(id, to, args, resp)
}

// RequestPreVote implements raft.WithPreVote.
func (l *link) RequestPreVote(id raft.ServerID, to raft.ServerAddress, args *raft.RequestPreVoteRequest, resp *raft.RequestPreVoteResponse) error {
	if l.cut.Load() {
		return errCut
	}
	return l.NetworkTransport.RequestPreVote(id, to, args, resp)
}

// InstallSnapshot implements raft.Transport.
func (l *link) InstallSnapshot(id raft.ServerID, to raft.ServerAddress, args *raft.InstallSnapshotRequest, resp *raft.InstallSnapshotResponse, data io.Reader) error {
	if l.cut.Load() {
		return errCut
	}
	return l.NetworkTransport.InstallSnapshot(id, to, args, resp, data)
}

// Close implements raft.WithClose. A second call does nothing.
func (l *link) Close() error {
	select {
	case <-l.done:
		return nil
	default:
	}
	close(l.done)
	err := l.NetworkTransport.Close()
	l.pump.Wait()
	return err
}

// byID makes the node id the address: where a node is now is the business of
// Peers, so that a cluster whose addresses all changed elects by itself.
type byID struct{}

// ServerAddr implements raft.ServerAddressProvider.
func (byID) ServerAddr(id raft.ServerID) (raft.ServerAddress, error) {
	return raft.ServerAddress(id), nil
}

// streams is Raft's stream layer over the node's connections.
type streams struct {
	peers  Peers
	ctx    context.Context // ends with Close; a listener has nowhere else to keep it
	cancel context.CancelFunc
	self   placement.NodeID

	mu     sync.Mutex
	closed bool
	dialed map[*dialedConn]struct{} // that are not closed
}

// dialedConn is a connection to another replica. Raft would wait for what runs on
// it when it stops, until its timeout: the layer closes them.
type dialedConn struct {
	net.Conn
	s *streams
}

// Close implements net.Conn.
func (c *dialedConn) Close() error {
	c.s.mu.Lock()
	delete(c.s.dialed, c)
	c.s.mu.Unlock()
	return c.Conn.Close()
}

func (s *streams) track(c net.Conn) (net.Conn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errors.Join(errCut, c.Close())
	}
	d := &dialedConn{c, s}
	s.dialed[d] = struct{}{}
	return d, nil
}

// Accept implements net.Listener.
func (s *streams) Accept() (net.Conn, error) { return s.peers.Accept(s.ctx) }

// Close implements net.Listener.
func (s *streams) Close() error {
	s.cancel()
	s.mu.Lock()
	s.closed = true
	open := slices.Collect(maps.Keys(s.dialed))
	s.mu.Unlock()
	var errs []error
	for _, c := range open {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}

// Addr implements net.Listener.
func (s *streams) Addr() net.Addr { return nodeAddr(s.self) }

// Dial implements raft.StreamLayer.
func (s *streams) Dial(address raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	id, err := nodeOf(raft.ServerID(address))
	if err != nil {
		return nil, fmt.Errorf("dial replica: %w", err)
	}
	ctx, cancel := context.WithTimeout(s.ctx, timeout)
	defer cancel()
	c, err := s.peers.Dial(ctx, id)
	if err != nil {
		return nil, err
	}
	return s.track(c)
}

// nodeAddr is a node id as a network address.
type nodeAddr placement.NodeID

// Network implements net.Addr.
func (nodeAddr) Network() string { return "kvtier" }

// String implements net.Addr.
func (a nodeAddr) String() string { return placement.NodeID(a).String() }
