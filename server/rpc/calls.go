package rpc

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
)

// LatencyBuckets is the number of buckets of a latency histogram: bucket i
// counts calls that took less than 2^i microseconds and not less than half of
// that; the last one takes the rest.
const LatencyBuckets = 26

// callKind numbers what is counted by itself: the unary and streaming methods,
// and the messages of the attachment stream.
type callKind int

const (
	callOther callKind = iota
	callStreamFetch
	callStreamAdopt
	callStreamRelease
	callStreamRenew
	callMethods // the first number of a method
)

// methods are the counted methods, in the order of their numbers.
var methods = []string{
	"RegisterNamespace", "Lookup", "Fetch", "Adopt", "Release", "Renew", "Reserve", "Commit", "Abort",
	"Prefetch", "Cancel", "Retain", "Demote", "Drop", "Pin", "Attach", "ReadPages", "WritePages",
	"RegisterRegion", "DropRegion", "FetchInto",
	"GetStatus", "ListTiers", "ListBlocks", "GetBlock", "ListAttachments", "ListNodes", "Explain", "SaveSnapshot", "RestoreSnapshot",
	"DrainNode", "UndrainNode", "PlanRebalance", "ApplyPlan", "GetPlan", "CancelPlan", "ListAudit",
	"Locate",
	"OpenSession", "AppendSession", "GetSession", "ListSessions", "ShareSession", "RetainSession", "CloseSession", "WatchSessions", "MigrateSession", "CancelMigration",
}

// Indexes of the first methods of the services after the first.
const (
	firstAdmin   = 21
	firstCluster = 37
	firstSession = 38
)

// CallMetrics counts the calls of one kind since the start.
type CallMetrics struct {
	Name    string // such as "Fetch", or "stream/Fetch" for messages on an attachment stream
	Calls   uint64
	Errors  uint64
	Seconds float64 // sum of the time taken
	Latency [LatencyBuckets]uint64
}

type callCounter struct {
	calls, errors, nanos atomic.Uint64
	latency              [LatencyBuckets]atomic.Uint64
}

// adminPrefix begins the full names of the methods of the AdminService.
const adminPrefix = "/kvtier.v1.AdminService/"

// calls counts calls, bounds those in flight and keeps engines out of the
// AdminService.
type calls struct {
	admin    func(ctx context.Context, changes bool) error
	max      int64
	inFlight atomic.Int64
	refused  atomic.Uint64
	kinds    map[string]callKind // by full method name
	counters []callCounter
}

func newCalls(maxInFlight int, admin func(ctx context.Context, changes bool) error) *calls {
	c := &calls{admin: admin, max: int64(maxInFlight), kinds: map[string]callKind{}, counters: make([]callCounter, int(callMethods)+len(methods))}
	for i, m := range methods {
		prefix := "/kvtier.v1.PagesService/"
		switch {
		case i >= firstSession:
			prefix = "/kvtier.v1.SessionsService/"
		case i >= firstCluster:
			prefix = "/kvtier.v1.ClusterService/"
		case i >= firstAdmin:
			prefix = adminPrefix
		}
		c.kinds[prefix+m] = callMethods + callKind(i)
	}
	return c
}

func (k callKind) name() string {
	switch k {
	case callOther:
		return "other"
	case callStreamFetch:
		return "stream/Fetch"
	case callStreamAdopt:
		return "stream/Adopt"
	case callStreamRelease:
		return "stream/Release"
	case callStreamRenew:
		return "stream/Renew"
	}
	return methods[k-callMethods]
}

// timing is one call under way.
type timing struct {
	counter *callCounter
	start   time.Time
}

func (c *calls) begin(k callKind) timing {
	return timing{&c.counters[k], time.Now()}
}

func (t timing) end(err error) {
	d := time.Since(t.start)
	t.counter.calls.Add(1)
	if err != nil {
		t.counter.errors.Add(1)
	}
	t.counter.nanos.Add(uint64(d))
	t.counter.latency[min(bits.Len64(uint64(d.Microseconds())), LatencyBuckets-1)].Add(1)
}

func (c *calls) metrics() []CallMetrics {
	out := make([]CallMetrics, 0, len(c.counters))
	for k := range c.counters {
		n := &c.counters[k]
		m := CallMetrics{
			Name: callKind(k).name(), Calls: n.calls.Load(), Errors: n.errors.Load(),
			Seconds: time.Duration(n.nanos.Load()).Seconds(),
		}
		for i := range n.latency {
			m.Latency[i] = n.latency[i].Load()
		}
		out = append(out, m)
	}
	return out
}

// enter takes a place among the calls in flight; the caller leaves.
func (c *calls) enter() error {
	if c.inFlight.Add(1) > c.max {
		c.inFlight.Add(-1)
		c.refused.Add(1)
		return kvstatus.WithRetry(fmt.Errorf("%d calls in flight, the most this node takes at once: %w", c.max, paging.ErrUnavailable), 20*time.Millisecond)
	}
	return nil
}

func (c *calls) leave() { c.inFlight.Add(-1) }

// unary counts, bounds and translates the errors of every unary call.
func (c *calls) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if err := c.enter(); err != nil {
		return nil, kvstatus.Status(err)
	}
	defer c.leave()
	timed := c.begin(c.kinds[info.FullMethod])
	resp, err := c.guarded(ctx, req, info.FullMethod, handler)
	timed.end(err)
	if err != nil {
		return nil, kvstatus.Status(err)
	}
	return resp, nil
}

func (c *calls) guarded(ctx context.Context, req any, method string, handler grpc.UnaryHandler) (any, error) {
	if err := c.authorize(ctx, method); err != nil {
		return nil, err
	}
	return handler(ctx, req)
}

// authorize keeps engines out of the AdminService, and those who may only read away
// from what changes something.
func (c *calls) authorize(ctx context.Context, method string) error {
	if name, ok := strings.CutPrefix(method, adminPrefix); ok {
		return c.admin(ctx, changing[name])
	}
	return nil
}

// changing are the methods of the AdminService that change something.
var changing = map[string]bool{"RestoreSnapshot": true, "DrainNode": true, "UndrainNode": true, "ApplyPlan": true, "CancelPlan": true}

// stream does the same for streaming calls. Attachments and those who watch sessions
// have bounds of their own and are long: they take no place.
func (c *calls) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if !strings.HasSuffix(info.FullMethod, "/Attach") && !strings.HasSuffix(info.FullMethod, "/WatchSessions") {
		if err := c.enter(); err != nil {
			return kvstatus.Status(err)
		}
		defer c.leave()
	}
	timed := c.begin(c.kinds[info.FullMethod])
	err := c.authorize(ss.Context(), info.FullMethod)
	if err == nil {
		err = handler(srv, ss)
	}
	timed.end(err)
	return kvstatus.Status(err)
}

// authorization is the authorization header, or empty.
func authorization(ctx context.Context) string {
	values := metadata.ValueFromIncomingContext(ctx, kvstatus.AuthorizationKey)
	if len(values) == 0 {
		return ""
	}
	return values[0]
}

// expired reports a call whose time is over.
func expired(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		if errors.Is(err, context.DeadlineExceeded) {
			return fmt.Errorf("the call's deadline has passed: %w", paging.ErrExpired)
		}
		return err
	}
	return nil
}
