package client

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"time"

	"google.golang.org/grpc/mem"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
)

// Config says which node a client uses and who the client is. One of Socket and
// Address is given. The zero value of every other field is the stated default.
type Config struct {
	// Socket is the path of the node's gRPC socket: the client attaches, and
	// pages are read and written in place.
	Socket string
	// Address is host:port of the node's gRPC listener for a client on another
	// machine: the bytes of pages are streamed into and out of private memory.
	Address string
	// TLS is used with Address. nil: plaintext, and then Token may go to a
	// loopback address only.
	TLS *tls.Config
	// Token is sent as bearer token with each call. Empty: the node decides the
	// tenant by other means.
	Token string

	// Engine and EngineVersion are for people, at most 64 bytes each.
	Engine, EngineVersion string
	// Group and GroupSecret (16 to 64 bytes) make this attachment a member of a
	// group that shares the decisions of Fetch. Empty: no group.
	Group       string
	GroupSecret []byte
	// Ranks of the layout that this process reads and writes. Empty: all.
	Ranks []uint32

	// DevicePool asks for the memory of the node's HBM tier, if it has one: leases
	// with Wanted TierHBM lie there (Socket only). See Client.Pool.
	DevicePool bool
	// WorkingBytes is the memory on the device that this client writes, beside the
	// pool: where Reserve with Tier TierHBM puts pages. 0: none.
	WorkingBytes int64

	// StagingBytes is the memory for pages being written: asked of the node with
	// Socket (0: the node's default), private with Address (0: 64 MiB).
	StagingBytes int64
	// PrivateBytes bounds the memory of leases that hold private copies of pages
	// (Address only): a Fetch is cut to what fits. What was released stays for the
	// next Fetch, inside the same bound. 0: 1 GiB.
	PrivateBytes int64

	// CallTimeout bounds each call whose context has no deadline, beside the time
	// that the request itself gives the node. Streams of pages are bounded by their
	// context and by the time between two pieces. 0: 5 s.
	CallTimeout time.Duration
	// StallTimeout is the silence of a node that is being asked after which calls
	// fail at once until it is heard again. 0: 48 ms. Raise it if short freezes
	// of the whole machine are normal, up to what a request may be held up.
	StallTimeout time.Duration
	// DialTimeout bounds one try to attach. 0: 2 s.
	DialTimeout time.Duration
	// MaxHold bounds the time over which a held lease is renewed by itself. 0: 10 min.
	MaxHold time.Duration
	// UnaryCalls makes Fetch, Adopt, Release and Renew unary calls instead of
	// messages on the attachment stream: slower, for comparison.
	UnaryCalls bool

	// Logger gets changes of state. nil: nothing is logged.
	Logger *slog.Logger

	pool mem.BufferPool // of received frames; tests give one that spoils what it gets back
}

const (
	defaultStaging      = 64 << 20
	defaultPrivate      = 1 << 30
	defaultCallTimeout  = 5 * time.Second
	defaultStallTimeout = 48 * time.Millisecond
	defaultDialTimeout  = 2 * time.Second
	defaultMaxHold      = 10 * time.Minute
)

func (c Config) withDefaults() Config {
	if c.Address != "" && c.StagingBytes == 0 {
		c.StagingBytes = defaultStaging
	}
	if c.PrivateBytes == 0 {
		c.PrivateBytes = defaultPrivate
	}
	for _, d := range []struct {
		field *time.Duration
		value time.Duration
	}{
		{&c.CallTimeout, defaultCallTimeout},
		{&c.StallTimeout, defaultStallTimeout},
		{&c.DialTimeout, defaultDialTimeout},
		{&c.MaxHold, defaultMaxHold},
	} {
		if *d.field == 0 {
			*d.field = d.value
		}
	}
	if c.pool == nil {
		c.pool = newFramePool()
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	c.GroupSecret = slices.Clone(c.GroupSecret)
	c.Ranks = slices.Clone(c.Ranks)
	return c
}

// validate reports everything that is wrong, each with its field.
func (c *Config) validate() error {
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("client config: "+format+": %w", append(args, paging.ErrInvalid)...))
	}
	if (c.Socket == "") == (c.Address == "") {
		bad("give one of Socket and Address")
	}
	if c.TLS != nil && c.Address == "" {
		bad("TLS is for Address only")
	}
	if c.Token != "" && c.Address != "" && c.TLS == nil && !loopback(c.Address) {
		bad("a Token for %s needs TLS: it would be sent in the clear", c.Address)
	}
	for name, s := range map[string]string{"Engine": c.Engine, "EngineVersion": c.EngineVersion, "Group": c.Group} {
		if len(s) > kvstatus.MaxNameBytes {
			bad("%s has %d bytes, at most %d", name, len(s), kvstatus.MaxNameBytes)
		}
	}
	if n := len(c.GroupSecret); (c.Group != "" || n > 0) && (n < kvstatus.MinSecretBytes || n > kvstatus.MaxSecretBytes) {
		bad("GroupSecret has %d bytes, want %d to %d", n, kvstatus.MinSecretBytes, kvstatus.MaxSecretBytes)
	}
	if c.Group == "" && len(c.GroupSecret) > 0 {
		bad("GroupSecret without Group")
	}
	if c.StagingBytes < 0 || c.PrivateBytes < 0 || c.WorkingBytes < 0 {
		bad("StagingBytes, PrivateBytes and WorkingBytes are not negative")
	}
	if c.CallTimeout < 0 || c.StallTimeout < 0 || c.DialTimeout < 0 || c.MaxHold < 0 {
		bad("timeouts are not negative")
	}
	return errors.Join(errs...)
}

func loopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}
