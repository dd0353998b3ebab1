package kvstatus

import (
	"time"

	"google.golang.org/grpc/keepalive"
)

// ProtocolVersion is the version of the wire protocol that this code speaks.
const ProtocolVersion = 1

// Bounds of messages. No message needs a raised gRPC limit (4 MiB).
const (
	// MaxChunkBytes is the most bytes of a page in one message of a page stream.
	MaxChunkBytes = 1 << 20
	// MaxNameBytes bounds engine names, versions and group ids.
	MaxNameBytes = 64
	// MinSecretBytes and MaxSecretBytes bound a group's secret.
	MinSecretBytes = 16
	MaxSecretBytes = 64
	// MaxSaltBytes bounds the cache salt of a namespace.
	MaxSaltBytes = 256
	// AttachmentBytes is the length of an attachment id, an attempt token and an
	// adopt token.
	AttachmentBytes = 16
	// MaxReleases bounds the leases of one Release.
	MaxReleases = 65536
)

// Bounds of the times that a call may name.
const (
	MaxAttemptTTL      = 10 * time.Minute
	DefaultAttemptTTL  = time.Minute
	DefaultReserveTime = time.Second
	MaxPrefetchTime    = 10 * time.Minute
	DefaultPrefetch    = 30 * time.Second
	// MaxPageStream bounds the deadline of ReadPages and WritePages, which must
	// have one: a slow peer is cut when it passes.
	MaxPageStream = 10 * time.Minute
)

// AuthorizationKey is the metadata key that carries "Bearer <token>".
const AuthorizationKey = "authorization"

// Keepalive times. A client pings an idle link after KeepaliveTime and gives it
// up KeepaliveTimeout later; a server tolerates pings down to keepaliveMin, so
// that clocks and jitter never make it cut a well-behaved client.
const (
	KeepaliveTime    = 30 * time.Second
	KeepaliveTimeout = 10 * time.Second
	keepaliveMin     = 10 * time.Second
)

// ClientKeepalive is what every client of kvtier uses.
func ClientKeepalive() keepalive.ClientParameters {
	return keepalive.ClientParameters{Time: KeepaliveTime, Timeout: KeepaliveTimeout, PermitWithoutStream: true}
}

// ServerKeepalive is what every server of kvtier uses. The server pings too, at
// half the pace: it notices a peer that vanished while only it listens.
func ServerKeepalive() keepalive.ServerParameters {
	return keepalive.ServerParameters{Time: 2 * KeepaliveTime, Timeout: 2 * KeepaliveTimeout}
}

// ServerEnforcement is the ping policy of every server of kvtier.
func ServerEnforcement() keepalive.EnforcementPolicy {
	return keepalive.EnforcementPolicy{MinTime: keepaliveMin, PermitWithoutStream: true}
}
