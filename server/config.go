package server

import (
	"path/filepath"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/directory"
	"github.com/kvtier/kvtier/server/sessions"
	"github.com/kvtier/kvtier/tier"
)

// Kinds of device that Config.Device names.
const (
	DeviceAuto = "auto"
	DeviceHost = "host"
	DeviceCUDA = "cuda:" // and the number of the device
)

// Off as the value of an address says that nothing listens there.
const Off = "off"

// Config is everything that a node can be told. A field's zero value means the
// default that its comment gives.
type Config struct {
	// Dir is the data directory: the node's identity and the NVMe tier. Empty: the
	// node keeps pages in RAM only and has a new identity at each start.
	Dir string `yaml:"dir"`
	// Socket is the path of the gRPC unix socket. Empty:
	// /run/kvtier/kvtier.sock; the command sets one under $XDG_RUNTIME_DIR when it
	// does not run as root.
	Socket string `yaml:"socket"`
	// HandoffSocket is the path of the socket that descriptors are handed over.
	// Empty: kvtier-fd.sock beside Socket.
	HandoffSocket string `yaml:"handoff-socket"`
	// SocketGroup is the group that may use the sockets. Empty: kvtier if that
	// group exists, else the group of the process.
	SocketGroup string `yaml:"socket-group"`
	// Listen is the TCP address of gRPC, for clients that are not co-located, such
	// as 127.0.0.1:7440. Empty or "off": none.
	Listen string `yaml:"listen"`
	// HTTPListen is the address of /metrics, /healthz and /readyz. Empty:
	// 127.0.0.1:7445. "off": none.
	HTTPListen string `yaml:"http-listen"`

	// RAMBytes is the budget of the RAM tier, staging included. 0: 4 GiB.
	RAMBytes Size `yaml:"ram"`
	// HBMBytes is the budget of the tier on a device, working pages of engines
	// included. 0: there is no such tier.
	HBMBytes Size `yaml:"hbm"`
	// Device holds the HBM tier: auto (the first CUDA device, else host), host (memory
	// of this machine that behaves like a device's), cuda:N. Empty: auto.
	Device string `yaml:"device"`
	// NVMeBytes is the budget of the NVMe tier. 0: 16 GiB with Dir, none without.
	NVMeBytes Size `yaml:"nvme"`
	// Policy is the eviction policy. Empty: "default".
	Policy string `yaml:"policy"`
	// FlushAfter is the time after its commit in which a page is written to NVMe
	// while the disk is idle. 0: 10 s.
	FlushAfter time.Duration `yaml:"flush-after"`
	// StagingBytes is the writable memory given to an engine that does not say how
	// much it wants; the most is an eighth of RAMBytes. 0: 64 MiB, or that eighth.
	StagingBytes Size `yaml:"staging"`
	// HugePages asks for pages of 2 MiB under the RAM tier: from the kernel's pool,
	// else transparent ones.
	HugePages bool `yaml:"huge-pages"`
	// NUMANode binds the RAM tier to a memory node. Absent: it is not bound.
	NUMANode *int `yaml:"numa-node"`

	// LeaseTTL is the time to live of a lease whose request names none. 0: 60 s.
	LeaseTTL time.Duration `yaml:"lease-ttl"`
	// StopWithin bounds a graceful stop. 0: 30 s.
	StopWithin time.Duration `yaml:"stop-within"`
	// MaxAttachments bounds the engine processes attached at once. 0: 256.
	MaxAttachments int `yaml:"max-attachments"`
	// MaxCallsInFlight bounds the calls that run at once. 0: 1024.
	MaxCallsInFlight int `yaml:"max-calls-in-flight"`
	// PrefetchBytes bounds the bytes that prefetches have in flight. 0: a
	// sixteenth of RAMBytes.
	PrefetchBytes Size `yaml:"prefetch"`

	// Tenants says who is who. None: every caller of the unix socket is the tenant
	// "default".
	Tenants []Tenant `yaml:"tenants"`
	// TLS of the Listen address.
	TLS TLS `yaml:"tls"`
	// Insecure allows listeners beyond this machine without TLS and tokens.
	Insecure bool `yaml:"insecure"`
	// OTLPEndpoint is the host:port of an OpenTelemetry collector (gRPC) that
	// traces are sent to. Empty: no tracing.
	OTLPEndpoint string `yaml:"otlp-endpoint"`

	// Name is what people call the node, at most 64 characters. Empty: the name of the
	// machine.
	Name string `yaml:"name"`
	// Bootstrap makes the node the first of a new cluster. It says nothing to a node
	// that is of one.
	Bootstrap bool `yaml:"bootstrap"`
	// Join are peer addresses of nodes of a cluster, host:port with commas between: a
	// node that is of none becomes one of theirs. Empty, without Bootstrap, and Dir
	// knows of no cluster: the node is alone.
	Join string `yaml:"join"`
	// PeerListen is the address of the port for other nodes. Empty: 127.0.0.1:7441.
	PeerListen string `yaml:"peer-listen"`
	// PeerAdvertise is the address of that port as others reach it. Empty: PeerListen.
	PeerAdvertise string `yaml:"peer-advertise"`
	// GossipListen is the address of gossip, ip:port. Empty: 127.0.0.1:7442.
	GossipListen string `yaml:"gossip-listen"`
	// GossipAdvertise is that address as others reach it. Empty: GossipListen.
	GossipAdvertise string `yaml:"gossip-advertise"`
	// GossipKey is a file with the key that gossip is encrypted with, the same on all
	// nodes. Empty: it is not.
	GossipKey string `yaml:"gossip-key"`
	// MaxClaims bounds the claims of the cluster's directory while this node leads it,
	// about 60 bytes of memory each on every node. 0: 16 million.
	MaxClaims int `yaml:"max-claims"`
	// ClaimsGrace is how long the claims of a node that is down are kept. 0: 10 min.
	ClaimsGrace time.Duration `yaml:"claims-grace"`

	// MaxSessions bounds the sessions of each tenant. 0: 100,000.
	MaxSessions int `yaml:"max-sessions"`
	// MoveBandwidth is the most that this node spends on moving its sessions to other
	// nodes, a second. 0: no limit.
	MoveBandwidth Size `yaml:"move-bandwidth"`

	// Origins says where a value came from, by the name of its field: "file",
	// "env" or "flag". It is shown by status and decides nothing.
	Origins map[string]string `yaml:"-"`
}

// Tenant is a party whose pages nobody else sees.
type Tenant struct {
	// Name, 1 to 64 letters, digits, '-', '_' or '.'.
	Name string `yaml:"name"`
	// UIDs are the users whose processes are this tenant on the unix socket.
	UIDs []uint32 `yaml:"uids"`
	// Tokens are bearer tokens of this tenant.
	Tokens []Token `yaml:"tokens"`
	// RAMBytes is the most that the tenant's pages may take of the RAM tier. 0: all.
	RAMBytes Size `yaml:"ram"`
	// NVMeBytes is the same for the NVMe tier. 0: all.
	NVMeBytes Size `yaml:"nvme"`
	// HBMBytes is the same for the HBM tier. 0: all.
	HBMBytes Size `yaml:"hbm"`
}

// Token is a bearer token: a secret of at least 16 characters.
type Token struct {
	// Secret is the token itself.
	Secret string `yaml:"secret"`
	// Role is engine, operator or read-only. Empty: engine.
	Role string `yaml:"role"`
}

// TLS names the files of a listener's certificate.
type TLS struct {
	// Cert and Key are PEM files. Empty: no TLS.
	Cert string `yaml:"cert"`
	Key  string `yaml:"key"`
	// CA is a PEM file of those who sign clients' certificates. Empty: clients
	// show none.
	CA string `yaml:"ca"`
	// ClientAuth refuses clients without a certificate that CA signed.
	ClientAuth bool `yaml:"client-auth"`
}

// Defaults.
const (
	defaultSocket           = "/run/kvtier/kvtier.sock"
	defaultRAMBytes         = 4 << 30
	defaultNVMeBytes        = 16 << 30
	defaultStagingBytes     = 64 << 20
	defaultLeaseTTL         = time.Minute
	defaultStopWithin       = 30 * time.Second
	defaultMaxAttachments   = 256
	defaultMaxCallsInFlight = 1024
	defaultHTTPListen       = "127.0.0.1:7445"
	defaultPeerListen       = "127.0.0.1:7441"
	defaultGossipListen     = "127.0.0.1:7442"
	defaultClaimsGrace      = 10 * time.Minute
	prefetchShare           = 16 // PrefetchBytes is RAMBytes over this
	stagingShare            = 8  // staging of one attachment is at most RAMBytes over this
)

func orDefault[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}

// WithDefaults is c with every zero field replaced by its default.
func (c Config) WithDefaults() Config {
	orDefault(&c.Socket, defaultSocket)
	orDefault(&c.HandoffSocket, filepath.Join(filepath.Dir(c.Socket), "kvtier-fd.sock"))
	orDefault(&c.Listen, Off)
	orDefault(&c.HTTPListen, defaultHTTPListen)
	orDefault(&c.RAMBytes, defaultRAMBytes)
	if c.Dir != "" {
		orDefault(&c.NVMeBytes, defaultNVMeBytes)
	}
	orDefault(&c.Device, DeviceAuto)
	orDefault(&c.Policy, tier.DefaultPolicy)
	orDefault(&c.FlushAfter, tier.DefaultFlushAfter)
	orDefault(&c.StagingBytes, max(min(defaultStagingBytes, c.RAMBytes/stagingShare), paging.UnitBytes))
	orDefault(&c.LeaseTTL, defaultLeaseTTL)
	orDefault(&c.StopWithin, defaultStopWithin)
	orDefault(&c.MaxAttachments, defaultMaxAttachments)
	orDefault(&c.MaxCallsInFlight, defaultMaxCallsInFlight)
	orDefault(&c.PrefetchBytes, c.RAMBytes/prefetchShare)
	orDefault(&c.PeerListen, defaultPeerListen)
	orDefault(&c.GossipListen, defaultGossipListen)
	orDefault(&c.MaxClaims, directory.DefaultMaxClaims)
	orDefault(&c.ClaimsGrace, defaultClaimsGrace)
	orDefault(&c.MaxSessions, sessions.DefaultLimit)
	return c
}
