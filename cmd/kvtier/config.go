package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/kvtier/kvtier/server"
)

// nodeConfig is what serve can be told: the node's configuration, and what only
// the command needs.
type nodeConfig struct {
	server.Config
	LogLevel  string
	LogFormat string
}

// setting is one scalar of the configuration. The key of the file (where a dot
// stands for nesting), the flag and the environment variable mean the same.
type setting struct {
	name  string // key in the file, such as "tls.cert"; the flag is --tls-cert, the variable KVTIER_TLS_CERT
	usage string
	field any // pointer into a nodeConfig: its type says how text is read
}

// settings lists every scalar of c.
func settings(c *nodeConfig) []setting {
	return []setting{
		{"dir", "`directory` of the node's identity and of its NVMe tier; empty: RAM only", &c.Dir},
		{"socket", "`path` of the gRPC socket for engines on this machine", &c.Socket},
		{"handoff-socket", "`path` of the socket that descriptors are handed over; empty: kvtier-fd.sock beside the socket", &c.HandoffSocket},
		{"socket-group", "`group` that may use the sockets; empty: kvtier if it exists, else that of the process", &c.SocketGroup},
		{"listen", "`host:port` of gRPC for clients on other machines; off: none", &c.Listen},
		{"http-listen", "`host:port` of metrics and health; off: none", &c.HTTPListen},
		{"ram", "budget of the RAM tier, staging included", &c.RAMBytes},
		{"hbm", "budget of the HBM tier on a device, working pages of engines included; 0: none", &c.HBMBytes},
		{"device", "`device` of the HBM tier: auto (CUDA where there is one), host, cuda:N", &c.Device},
		{"nvme", "budget of the NVMe tier; 0: none, and dir is not used", &c.NVMeBytes},
		{"policy", "eviction `policy`", &c.Policy},
		{"flush-after", "write a page to an idle disk this long after its commit", &c.FlushAfter},
		{"staging", "memory given to an engine to write into, if it does not say how much it wants; 0: an eighth of ram, at most 64MiB", &c.StagingBytes},
		{"huge-pages", "take the RAM tier from pages of 2 MiB: reserved ones, else transparent ones", &c.HugePages},
		{"numa-node", "memory `node` that the RAM tier is bound to; empty: any", &c.NUMANode},
		{"lease-ttl", "time to live of a lease that names none", &c.LeaseTTL},
		{"stop-within", "bound of a graceful stop", &c.StopWithin},
		{"max-attachments", "engine processes attached at once", &c.MaxAttachments},
		{"max-calls-in-flight", "calls that run at once", &c.MaxCallsInFlight},
		{"prefetch", "bytes that prefetches have in flight; 0: a sixteenth of ram", &c.PrefetchBytes},
		{"tls.cert", "PEM `file` with the certificate of the listener", &c.TLS.Cert},
		{"tls.key", "PEM `file` with its key", &c.TLS.Key},
		{"tls.ca", "PEM `file` with those who sign clients' certificates", &c.TLS.CA},
		{"tls.client-auth", "refuse clients without a certificate", &c.TLS.ClientAuth},
		{"name", "`name` of the node for people; empty: that of the machine", &c.Name},
		{"bootstrap", "be the first node of a new cluster", &c.Bootstrap},
		{"join", "peer addresses, `host:port,...`, of nodes of the cluster to join", &c.Join},
		{"peer-listen", "`host:port` for other nodes of the cluster", &c.PeerListen},
		{"peer-advertise", "that `host:port` as other nodes reach it; empty: peer-listen", &c.PeerAdvertise},
		{"gossip-listen", "`ip:port` of gossip", &c.GossipListen},
		{"gossip-advertise", "that `ip:port` as other nodes reach it; empty: gossip-listen", &c.GossipAdvertise},
		{"gossip-key", "`file` with the key of gossip; empty: gossip is not encrypted", &c.GossipKey},
		{"max-sessions", "sessions of each tenant", &c.MaxSessions},
		{"move-bandwidth", "bytes a second for sessions that move to other nodes (0: no limit)", &c.MoveBandwidth},
		{"max-claims", "claims that the cluster's directory holds", &c.MaxClaims},
		{"claims-grace", "keep the claims of a node that is down this long", &c.ClaimsGrace},
		{"insecure", "allow listeners beyond this machine without TLS and authentication", &c.Insecure},
		{"otlp-endpoint", "`host:port` of an OpenTelemetry collector that traces go to; empty: no tracing", &c.OTLPEndpoint},
		{"log-level", "`level` of the log: debug, info, warn or error", &c.LogLevel},
		{"log-format", "`format` of the log: text or json", &c.LogFormat},
	}
}

// fileOnly are the keys that have a structure and are read from the file alone.
const tenantsKey = "tenants"

// defaultConfig is what holds without file, environment and flags: the node's
// own defaults, and the places that depend on who runs it.
func defaultConfig() nodeConfig {
	c := server.Config{Dir: defaultDir(), Socket: defaultSocket()}.WithDefaults()
	// These follow from others, which a later source may set.
	c.HandoffSocket, c.StagingBytes, c.PrefetchBytes = "", 0, 0
	return nodeConfig{Config: c, LogLevel: "info", LogFormat: "text"}
}

// defaultSocket is where a node that was told nothing listens, and where the
// tools look for it.
func defaultSocket() string {
	if os.Geteuid() == 0 {
		return "/run/kvtier/kvtier.sock"
	}
	if dir := os.Getenv("XDG_RUNTIME_DIR"); dir != "" {
		return filepath.Join(dir, "kvtier", "kvtier.sock")
	}
	return filepath.Join(os.TempDir(), fmt.Sprintf("kvtier-%d", os.Geteuid()), "kvtier.sock")
}

func defaultDir() string {
	if os.Geteuid() == 0 {
		return "/var/lib/kvtier"
	}
	if dir := os.Getenv("XDG_STATE_HOME"); dir != "" {
		return filepath.Join(dir, "kvtier")
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return filepath.Join(os.TempDir(), fmt.Sprintf("kvtier-%d-data", os.Geteuid()))
	}
	return filepath.Join(home, ".local", "state", "kvtier")
}

// withDefaults resolves what follows from other settings, for those who look at
// the configuration: the checks and --print-config.
func (c nodeConfig) withDefaults() nodeConfig {
	c.Config = c.WithDefaults()
	return c
}

// nvmeDir is where the NVMe tier lies. Empty: there is none.
func (c *nodeConfig) nvmeDir() string {
	if c.Dir == "" || c.NVMeBytes == 0 {
		return ""
	}
	return filepath.Join(c.Dir, "nvme")
}
