package client_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server"
)

// faces are the configs of a client in place (false) and of one that streams.
func faces(n *testNode) map[bool]client.Config {
	streamed := patient(n)
	streamed.Socket, streamed.Address = "", n.address
	return map[bool]client.Config{false: patient(n), true: streamed}
}

func TestStreamedPages(t *testing.T) {
	n := startTestNode(t)
	near, far := open(t, faces(n)[false]), open(t, faces(n)[true])
	ns := register(t, near)
	if id := register(t, far); id != ns {
		t.Fatalf("namespace %s is %s over TCP", ns.Short(), id.Short())
	}
	names := chain(1, 40)
	write(t, far, ns, names[:20])
	write(t, near, ns, names[20:])
	for what, c := range map[string]*client.Client{"near": near, "far": far} {
		lease := fetch(t, c, ns, chain(1, 50))
		if lease.Usable != 40 || lease.UsableTokens != 640 || lease.Tiers[39] != client.TierRAM {
			t.Errorf("%s: %d blocks, %d tokens", what, lease.Usable, lease.UsableTokens)
		}
		if len(lease.Shortfalls) != 1 || lease.Shortfalls[0].Block != 40 {
			t.Errorf("%s: shortfalls %v", what, lease.Shortfalls)
		}
		if err := readAll(lease, names, 2); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if err := lease.Release(t.Context()); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	if got := far.Metrics(); got.PrivateBytes != 0 || got.StreamedBytes != 60*(16<<10+4096) {
		t.Errorf("%d private bytes left, %d streamed", got.PrivateBytes, got.StreamedBytes)
	}
	if _, err := far.Prefetch(t.Context(), client.PrefetchRequest{Namespace: ns, Names: names}); !errors.Is(err, paging.ErrInvalid) {
		t.Errorf("prefetch without attachment: %v", err)
	}
	if _, err := far.Adopt(t.Context(), make([]byte, 16), 0); !errors.Is(err, paging.ErrInvalid) {
		t.Errorf("adopt without attachment: %v", err)
	}
	if err := far.Renew(t.Context(), 0); err != nil {
		t.Errorf("empty renew: %v", err)
	}
}

func TestStreamedPageWithWrongBytes(t *testing.T) {
	n := startTestNode(t)
	c := open(t, faces(n)[true])
	ns := register(t, c)
	names := chain(1, 10)
	write(t, c, ns, names)
	n.mu.Lock()
	n.pages[testKey{ns, names[6], 1}].mem[100] ^= 1
	n.mu.Unlock()
	lease := fetch(t, c, ns, names)
	if lease.Usable != 6 || lease.UsableTokens != 96 || len(lease.Tiers) != 6 {
		t.Errorf("%d blocks, %d tokens usable", lease.Usable, lease.UsableTokens)
	}
	if len(lease.Shortfalls) != 1 || lease.Shortfalls[0].Block != 6 || lease.Shortfalls[0].Reason != client.ReasonCorrupt {
		t.Errorf("shortfalls %v", lease.Shortfalls)
	}
	if _, ok := lease.Page(6, 1); ok {
		t.Error("a view of a corrupt page")
	}
	if err := readAll(lease, names, 2); err != nil {
		t.Error(err)
	}
	lease.ReleaseAsync()
	set, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: names, Mode: client.ModeSet})
	if err != nil {
		t.Fatal(err)
	}
	if set.Usable != 9 || set.Rows != 10 {
		t.Errorf("set: %d of %d", set.Usable, set.Rows)
	}
	set.ReleaseAsync()
	if got := c.Metrics(); got.Corrupt != 2 || got.PrivateBytes != 0 {
		t.Errorf("%d corrupt counted, %d private bytes left", got.Corrupt, got.PrivateBytes)
	}
}

func TestStreamedFetchIsCutToItsMemory(t *testing.T) {
	n := startTestNode(t)
	cfg := faces(n)[true]
	cfg.PrivateBytes = 3 * (16<<10 + 4096)
	c := open(t, cfg)
	ns := register(t, c)
	names := chain(1, 10)
	write(t, c, ns, names)
	first := fetch(t, c, ns, names)
	if first.Usable != 3 || len(first.Shortfalls) != 1 || first.Shortfalls[0] != (client.Shortfall{Block: 3, Count: 7, Reason: client.ReasonNoSpace}) {
		t.Errorf("%d blocks, shortfalls %v", first.Usable, first.Shortfalls)
	}
	second := fetch(t, c, ns, names)
	if second.ID != 0 || second.Usable != 0 {
		t.Errorf("beyond the bound: %d blocks", second.Usable)
	}
	if err := errors.Join(readAll(first, names, 2), first.Release(t.Context()), second.Release(t.Context())); err != nil {
		t.Error(err)
	}
	third := fetch(t, c, ns, names)
	if third.Usable != 3 {
		t.Errorf("after release: %d blocks", third.Usable)
	}
	third.ReleaseAsync()
}

// A sliding window: only the last blocks of one part are sent.
func TestStreamedWindow(t *testing.T) {
	n := startTestNode(t)
	namespace := testNamespace()
	namespace.Layout.Attention = "hybrid"
	namespace.Layout.Parts[1].LastBlocks = 2
	for streamed, cfg := range faces(n) {
		c := open(t, cfg)
		ns, err := c.RegisterNamespace(t.Context(), namespace)
		if err != nil {
			t.Fatal(err)
		}
		names := chain(1, 10)
		write(t, c, ns, names)
		lease := fetch(t, c, ns, names)
		if lease.Usable != 10 {
			t.Errorf("streamed=%v: %d blocks", streamed, lease.Usable)
		}
		for row := range 10 {
			view, ok := lease.Page(row, 1)
			if ok != (row >= 8) {
				t.Errorf("streamed=%v: page of the window at row %d: %v", streamed, row, ok)
			}
			view.Close()
		}
		lease.ReleaseAsync()
	}
}

func TestStreamedAnswersAreChecked(t *testing.T) {
	n := startTestNode(t)
	c := open(t, faces(n)[true])
	ns := register(t, c)
	names := chain(1, 4)
	write(t, c, ns, names)
	for what, mangle := range map[string]func(*kvtierv1.FetchResponse){
		"more usable than asked for": func(r *kvtierv1.FetchResponse) { r.UsableBlocks = 5 },
		"pages beyond the prefix":    func(r *kvtierv1.FetchResponse) { r.UsableBlocks, r.Tiers = 2, r.GetTiers()[:2] },
		"fewer tiers than rows":      func(r *kvtierv1.FetchResponse) { r.Tiers = r.GetTiers()[:1] },
	} {
		n.mu.Lock()
		n.mangle = mangle
		n.mu.Unlock()
		if _, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: names}); !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if got := c.Metrics().PrivateBytes; got != 0 {
		t.Errorf("%d private bytes left", got)
	}
}

func TestStreamedClientOverARestart(t *testing.T) {
	n := startTestNode(t)
	c := open(t, faces(n)[true])
	ns := register(t, c)
	names := chain(1, 4)
	write(t, c, ns, names)
	lease := fetch(t, c, ns, names)
	n.stop()
	eventually(t, "calls without a node", func() bool {
		_, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: names})
		return errors.Is(err, paging.ErrUnavailable)
	})
	if err := errors.Join(readAll(lease, names, 2), lease.Release(t.Context())); err != nil {
		t.Errorf("private copies after the node's end: %v", err)
	}
	n.start(t)
	eventually(t, "calls after the node is back", func() bool { return tryWrite(t.Context(), c, ns, names) == nil })
}

func TestStreamedFetchEndsWithItsContext(t *testing.T) {
	n := startTestNode(t)
	c := open(t, faces(n)[true])
	ns := register(t, c)
	write(t, c, ns, chain(1, 4))
	n.frozen.close()
	defer n.frozen.open()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.Fetch(ctx, client.FetchRequest{Namespace: ns, Names: chain(1, 4)}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

// A client that Config.Token does not let in hears so at Open.
func TestTokenNeedsTLSFarAway(t *testing.T) {
	_, err := client.Open(t.Context(), client.Config{Address: "192.0.2.1:7440", Token: "secret"})
	if !errors.Is(err, paging.ErrInvalid) {
		t.Errorf("a token in the clear: %v", err)
	}
}

// spoilingPool overwrites what it gets back: who still reads it reads garbage.
type spoilingPool struct{}

func (spoilingPool) Get(length int) *[]byte {
	b := make([]byte, length)
	return &b
}

func (spoilingPool) Put(b *[]byte) {
	for i := range *b {
		(*b)[i] = 0xdb
	}
}

func TestManyStreamsOverAPoolThatSpoils(t *testing.T) {
	n := startDaemon(t, func(cfg *server.Config) { cfg.Listen = "127.0.0.1:0" })
	c := open(t, client.WithPool(daemonFaces(n)[true], spoilingPool{}))
	ns := register(t, c)
	const chains, length = 8, 10
	for i := range chains {
		write(t, c, ns, chain(i, length))
	}
	var streams sync.WaitGroup
	for i := range 64 {
		streams.Go(func() {
			names := chain(i%chains, length)
			lease, err := c.Fetch(t.Context(), client.FetchRequest{Namespace: ns, Names: names})
			if err != nil {
				t.Error(err)
				return
			}
			if err := errors.Join(readAll(lease, names, 2), lease.Release(t.Context())); err != nil || lease.Usable != length {
				t.Errorf("%d blocks: %v", lease.Usable, err)
			}
		})
	}
	streams.Wait()
	if got := c.Metrics().Corrupt; got != 0 {
		t.Errorf("%d pages arrived corrupt", got)
	}
}
