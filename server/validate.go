package server

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/rpc"
)

// Bounds of the configuration.
const (
	minRAMBytes       = 1 << 20
	minNVMeBytes      = 16 << 20
	minHBMBytes       = 16 << 20
	maxSocketPath     = 106 // sockaddr_un less the mark of a socket that is being made
	maxTenants        = 1024
	maxTenantName     = 64
	minTokenBytes     = 16
	maxAttachments    = 4096
	maxCallsInFlight  = 1 << 16
	maxStopWithin     = 10 * time.Minute
	maxLeaseTTL       = 24 * time.Hour
	maxFlushAfter     = 24 * time.Hour
	maxNodeName       = 64
	maxTenantSessions = 4 << 20 // of all tenants: what a directory holds
	maxClaimsGrace    = 7 * 24 * time.Hour
)

// problems collects what is wrong with a configuration.
type problems []error

// add says what is wrong with a setting and how to mend it.
func (p *problems) add(name, format string, args ...any) {
	*p = append(*p, fmt.Errorf(name+": "+format+": %w", append(args, paging.ErrInvalid)...))
}

// Validate reports everything that is wrong with c, each with its remedy, after
// defaults. It touches nothing. The errors are paging.ErrInvalid.
func (c Config) Validate() error {
	c = c.WithDefaults()
	var p problems
	c.validateSizes(&p)
	c.validateSockets(&p)
	c.validateTimes(&p)
	c.validateListeners(&p)
	c.validateTenants(&p)
	c.validateCluster(&p)
	return errors.Join(p...)
}

func (c *Config) validateSizes(p *problems) {
	if c.RAMBytes < minRAMBytes {
		p.add("ram", "%v is less than the least, %v", c.RAMBytes, Size(minRAMBytes))
	}
	switch {
	case c.NVMeBytes < 0:
		p.add("nvme", "is negative")
	case c.NVMeBytes > 0 && c.Dir == "":
		p.add("nvme", "%v without a data directory: set dir, or leave nvme out", c.NVMeBytes)
	case c.NVMeBytes > 0 && c.NVMeBytes < minNVMeBytes:
		p.add("nvme", "%v is less than the least, %v", c.NVMeBytes, Size(minNVMeBytes))
	}
	switch {
	case c.HBMBytes < 0:
		p.add("hbm", "is negative")
	case c.HBMBytes > 0 && c.HBMBytes < minHBMBytes:
		p.add("hbm", "%v is less than the least, %v", c.HBMBytes, Size(minHBMBytes))
	}
	if _, _, err := ParseDevice(c.Device); err != nil {
		p.add("device", "%v", err)
	}
	if c.StagingBytes < paging.UnitBytes || c.StagingBytes > c.RAMBytes {
		p.add("staging", "%v: want %v to the size of ram, %v", c.StagingBytes, Size(paging.UnitBytes), c.RAMBytes)
	}
	if c.PrefetchBytes < 0 || c.PrefetchBytes > c.RAMBytes {
		p.add("prefetch", "%v is more than ram, %v", c.PrefetchBytes, c.RAMBytes)
	}
	if c.NUMANode != nil && (*c.NUMANode < 0 || *c.NUMANode > 1023) {
		p.add("numa-node", "%d: want a node number of /sys/devices/system/node, or leave it out", *c.NUMANode)
	}
}

func (c *Config) validateSockets(p *problems) {
	for _, s := range [...]struct{ name, path string }{{"socket", c.Socket}, {"handoff-socket", c.HandoffSocket}} {
		if len(s.path) > maxSocketPath {
			p.add(s.name, "the path has %d bytes, a unix socket takes %d: choose a shorter one", len(s.path), maxSocketPath)
		}
	}
	if c.Socket == c.HandoffSocket {
		p.add("handoff-socket", "is the same path as socket: leave it out, or name another")
	}
}

func (c *Config) validateTimes(p *problems) {
	for _, t := range [...]struct {
		name        string
		d           time.Duration
		least, most time.Duration
	}{
		{"lease-ttl", c.LeaseTTL, 100 * time.Millisecond, maxLeaseTTL},
		{"stop-within", c.StopWithin, 100 * time.Millisecond, maxStopWithin},
		{"flush-after", c.FlushAfter, time.Millisecond, maxFlushAfter},
	} {
		if t.d < t.least || t.d > t.most {
			p.add(t.name, "%v: want %v to %v", t.d, t.least, t.most)
		}
	}
	if c.MaxAttachments < 1 || c.MaxAttachments > maxAttachments {
		p.add("max-attachments", "%d: want 1 to %d", c.MaxAttachments, maxAttachments)
	}
	if c.MaxCallsInFlight < 1 || c.MaxCallsInFlight > maxCallsInFlight {
		p.add("max-calls-in-flight", "%d: want 1 to %d", c.MaxCallsInFlight, maxCallsInFlight)
	}
}

func (c *Config) validateListeners(p *problems) {
	if (c.TLS.Cert == "") != (c.TLS.Key == "") {
		p.add("tls", "cert and key go together: name both files")
	}
	if c.TLS.CA != "" && c.TLS.Cert == "" {
		p.add("tls.ca", "without tls.cert and tls.key there is no TLS to check a client's certificate in")
	}
	if c.TLS.ClientAuth && c.TLS.CA == "" {
		p.add("tls.client-auth", "needs tls.ca, the certificate of those who sign clients")
	}
	for _, l := range [...]struct {
		name, addr string
		secure     bool
		remedy     string
	}{
		{"listen", c.Listen, c.TLS.Cert != "" && (c.hasTokens() || c.TLS.ClientAuth), "set tls.cert and tls.key, and tokens or tls.client-auth"},
		{"http-listen", c.HTTPListen, false, "it has neither TLS nor tokens: listen on 127.0.0.1 and let a proxy face the network"},
	} {
		if l.addr == Off {
			continue
		}
		local, err := loopback(l.addr)
		switch {
		case err != nil:
			p.add(l.name, "%q: %v", l.addr, err)
		case !local && !l.secure && !c.Insecure:
			p.add(l.name, "%s can be reached from other machines without TLS and authentication: %s; or set insecure: true", l.addr, l.remedy)
		}
	}
	if c.OTLPEndpoint != "" {
		if _, _, err := net.SplitHostPort(c.OTLPEndpoint); err != nil {
			p.add("otlp-endpoint", "%q: want host:port", c.OTLPEndpoint)
		}
	}
}

// clustered reports whether the configuration asks for a cluster; the data directory
// may as well.
func (c *Config) clustered() bool { return c.Bootstrap || c.Join != "" }

func (c *Config) validateCluster(p *problems) {
	if c.clustered() && c.Dir == "" {
		p.add("dir", "a node of a cluster keeps its part of the directory: set dir")
	}
	if c.Bootstrap && c.Join != "" {
		p.add("bootstrap", "the first node of a cluster joins none: leave out one of bootstrap and join")
	}
	if len(c.Name) > maxNodeName {
		p.add("name", "%d bytes, at most %d", len(c.Name), maxNodeName)
	}
	if strings.ContainsFunc(c.Name, func(r rune) bool { return !unicode.IsPrint(r) }) {
		p.add("name", "%q: want what can be printed on one line", c.Name)
	}
	addresses := map[string]string{"peer-listen": c.PeerListen, "gossip-listen": c.GossipListen}
	for name, addr := range map[string]string{"peer-advertise": c.PeerAdvertise, "gossip-advertise": c.GossipAdvertise} {
		if addr != "" {
			addresses[name] = addr
		}
	}
	for i, addr := range c.seeds() {
		addresses[fmt.Sprintf("join[%d]", i)] = addr
	}
	for _, name := range slices.Sorted(maps.Keys(addresses)) {
		local, err := loopback(addresses[name])
		switch {
		case err != nil:
			p.add(name, "%q: %v", addresses[name], err)
		case c.clustered() && name == "peer-listen" && !local && (c.TLS.Cert == "" || c.TLS.CA == "") && !c.Insecure:
			p.add(name, "%s can be reached from other machines without TLS: set tls.cert, tls.key and tls.ca; or set insecure: true", addresses[name])
		case c.clustered() && name == "gossip-listen" && !local && c.GossipKey == "" && !c.Insecure:
			p.add(name, "%s can be reached from other machines without a key: set gossip-key; or set insecure: true", addresses[name])
		case strings.HasPrefix(name, "gossip-") && !ipLiteral(addresses[name]):
			p.add(name, "%q: want an IP address and a port", addresses[name])
		}
	}
	if c.MaxSessions < 0 || c.MaxSessions > maxTenantSessions {
		p.add("max-sessions", fmt.Sprintf("is not between 0 and %d", maxTenantSessions))
	}
	if c.MaxClaims < 0 {
		p.add("max-claims", "is negative")
	}
	if c.ClaimsGrace < time.Second || c.ClaimsGrace > maxClaimsGrace {
		p.add("claims-grace", "%v: want 1s to %v", c.ClaimsGrace, maxClaimsGrace)
	}
}

// seeds are the addresses of Join.
func (c *Config) seeds() []string {
	if c.Join == "" {
		return nil
	}
	seeds := strings.Split(c.Join, ",")
	for i := range seeds {
		seeds[i] = strings.TrimSpace(seeds[i])
	}
	return seeds
}

func ipLiteral(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	return err == nil && net.ParseIP(host) != nil
}

// loopback reports whether only this machine can reach addr.
func loopback(addr string) (bool, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return false, errors.New("want host:port, such as 127.0.0.1:7440")
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil {
		return false, fmt.Errorf("port %q: want a number up to 65535", port)
	} else if n == 0 && host == "" {
		return false, errors.New("names neither a host nor a port")
	}
	if host == "localhost" {
		return true, nil
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback(), nil
}

func (c *Config) hasTokens() bool {
	for _, t := range c.Tenants {
		if len(t.Tokens) > 0 {
			return true
		}
	}
	return false
}

func (c *Config) validateTenants(p *problems) {
	if len(c.Tenants) > maxTenants {
		p.add("tenants", "%d tenants, at most %d", len(c.Tenants), maxTenants)
		return
	}
	names, uids, secrets := map[string]bool{}, map[uint32]string{}, map[string]bool{}
	for i := range c.Tenants {
		t := &c.Tenants[i]
		at := fmt.Sprintf("tenants[%d]", i)
		if !tenantName(t.Name) {
			p.add(at+".name", "%q: want 1 to %d letters, digits, '-', '_' or '.'", t.Name, maxTenantName)
		}
		if names[t.Name] {
			p.add(at+".name", "%q stands twice: merge the two", t.Name)
		}
		names[t.Name] = true
		for _, uid := range t.UIDs {
			if other, taken := uids[uid]; taken {
				p.add(at+".uids", "uid %d belongs to tenant %q already: a user is of one tenant", uid, other)
			}
			uids[uid] = t.Name
		}
		t.validateTokens(p, at, secrets)
		if t.RAMBytes < 0 || t.RAMBytes > c.RAMBytes {
			p.add(at+".ram", "%v is more than ram, %v", t.RAMBytes, c.RAMBytes)
		}
		if t.HBMBytes < 0 || t.HBMBytes > c.HBMBytes {
			p.add(at+".hbm", "%v is more than hbm, %v", t.HBMBytes, c.HBMBytes)
		}
		if t.NVMeBytes < 0 || t.NVMeBytes > c.NVMeBytes {
			p.add(at+".nvme", "%v is more than nvme, %v", t.NVMeBytes, c.NVMeBytes)
		}
	}
}

func (t *Tenant) validateTokens(p *problems, at string, secrets map[string]bool) {
	for j, tok := range t.Tokens {
		name := fmt.Sprintf("%s.tokens[%d]", at, j)
		if len(tok.Secret) < minTokenBytes || strings.TrimSpace(tok.Secret) != tok.Secret {
			p.add(name, "a secret has at least %d characters and no space around it", minTokenBytes)
		}
		if secrets[tok.Secret] {
			p.add(name, "the secret is used twice: make another")
		}
		secrets[tok.Secret] = true
		if _, err := rpc.ParseRole(tok.Role); err != nil {
			p.add(name+".role", "%q: want engine, operator or read-only", tok.Role)
		}
	}
}

func tenantName(s string) bool {
	if s == "" || len(s) > maxTenantName {
		return false
	}
	for _, r := range s {
		if (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("-_.", r) {
			return false
		}
	}
	return true
}

// ParseDevice splits Config.Device into its kind and, for cuda, the device's number.
func ParseDevice(device string) (kind string, ordinal int, err error) {
	switch number, cuda := strings.CutPrefix(device, DeviceCUDA); {
	case device == "" || device == DeviceAuto:
		return DeviceAuto, 0, nil
	case device == DeviceHost:
		return DeviceHost, 0, nil
	case cuda:
		if n, err := strconv.Atoi(number); err == nil && n >= 0 {
			return DeviceCUDA, n, nil
		}
	}
	return "", 0, fmt.Errorf("%q: want auto, host or cuda:N", device)
}
