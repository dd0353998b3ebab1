package transport

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
)

// Introduction is what a node that joins has to know first.
type Introduction struct {
	Cluster string           // the cluster's UUID
	Node    placement.NodeID // that answered
	Gossip  string           // its gossip address, host:port
}

func (n *Introduction) encode() []byte {
	b := []byte{byte(len(n.Cluster))}
	b = append(b, n.Cluster...)
	b = append(b, byte(len(n.Gossip)))
	b = append(b, n.Gossip...)
	return binary.LittleEndian.AppendUint64(b, paging.Checksum(b))
}

func readIntroduction(r io.Reader) (n Introduction, err error) {
	var whole []byte
	for _, s := range []*string{&n.Cluster, &n.Gossip} {
		var length [1]byte
		if _, err := io.ReadFull(r, length[:]); err != nil {
			return n, err
		}
		text := make([]byte, length[0])
		if _, err := io.ReadFull(r, text); err != nil {
			return n, err
		}
		whole = append(append(whole, length[0]), text...)
		*s = string(text)
	}
	var sum [8]byte
	if _, err := io.ReadFull(r, sum[:]); err != nil {
		return n, err
	}
	if binary.LittleEndian.Uint64(sum[:]) != paging.Checksum(whole) || n.Cluster == "" {
		return n, errNoHello
	}
	return n, nil
}

// introduce answers a node that does not know the cluster yet.
func (m *Mux) introduce(l *link) {
	_ = l.SetDeadline(time.Now().Add(m.cfg.HandshakeTimeout)) // a connection that takes none fails at the write
	n := Introduction{Cluster: m.cfg.Cluster, Gossip: m.cfg.Gossip()}
	_, _ = l.Write(n.encode()) // who asked sees it
}

// DiscoverConfig of Discover.
type DiscoverConfig struct {
	ID      placement.NodeID // of the node that asks
	Address string           // the peer port of any node of the cluster
	TLS     *TLS             // as in MuxConfig
	// Insecure allows an address of another machine without TLS.
	Insecure bool
	Network  Network // nil: TCP
}

// Discover asks a node which cluster it is of, within 3 s or ctx. Errors:
// paging.ErrUnavailable (nobody answers), paging.ErrDenied (the node has no
// certificate of the cluster, or refuses this one), paging.ErrInvalid.
func Discover(ctx context.Context, cfg DiscoverConfig) (Introduction, error) {
	m := &Mux{cfg: MuxConfig{ID: cfg.ID, TLS: cfg.TLS, Network: cfg.Network, versions: versions{oldestVersion, Version}}}
	if m.cfg.Network == nil {
		local, err := loopback(cfg.Address)
		if err != nil {
			return Introduction{}, fmt.Errorf("%w: %w", err, paging.ErrInvalid)
		}
		m.cfg.Network = &tcp{open: local || cfg.TLS != nil || cfg.Insecure}
	}
	ctx, cancel := context.WithTimeout(ctx, discoverWithin)
	defer cancel()
	n, err := m.ask(ctx, cfg.Address)
	switch {
	case err == nil:
		return n, nil
	case errors.Is(err, paging.ErrDenied), errors.Is(err, paging.ErrIncompatible):
		return n, fmt.Errorf("node at %s: %w", cfg.Address, err)
	}
	return n, fmt.Errorf("node at %s: %w: %w", cfg.Address, paging.ErrUnavailable, err)
}

const discoverWithin = 3 * time.Second

func (m *Mux) ask(ctx context.Context, address string) (n Introduction, err error) {
	raw, err := m.cfg.Network.Dial(ctx, address)
	if err != nil {
		return n, err
	}
	defer hangUp(raw)
	stop := context.AfterFunc(ctx, func() { hangUp(raw) })
	defer stop()
	conn := raw
	if m.cfg.TLS != nil {
		if conn, err = m.cfg.TLS.dial(ctx, raw, placement.NodeID{}); err != nil {
			if errors.Is(err, errNotNamed) {
				err = fmt.Errorf("%w: %w", err, paging.ErrDenied)
			}
			return n, err
		}
	}
	h := hello{kind: discover, speaks: m.cfg.versions, from: m.cfg.ID}
	if _, err := conn.Write(h.encode()); err != nil {
		return n, err
	}
	w, err := readWelcome(conn)
	switch {
	case err != nil:
		return n, err
	case w.refusal != NotRefused:
		return n, &RefusedError{Why: w.refusal, Node: w.node}
	}
	if n, err = readIntroduction(conn); err == nil {
		n.Node = w.node
	}
	return n, err
}
