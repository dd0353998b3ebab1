package trust

import (
	"crypto/x509"
	"fmt"
	"net/url"
	"strings"

	"github.com/kvtier/kvtier/paging"
)

// Kind is what a certificate's holder is.
type Kind string

// Kinds.
const (
	Nobody Kind = "" // the certificate has no URI of kvtier
	Node   Kind = "node"
	Client Kind = "client"
)

// Roles of clients, as in the configuration of tokens.
const (
	RoleEngine   = "engine"
	RoleOperator = "operator"
	RoleReadOnly = "read-only"
)

// Identity is who a certificate says its holder is. The zero Identity is nobody.
type Identity struct {
	Cluster string // 1 to 63 letters, digits or '-'
	Kind    Kind
	Name    string // of the node or client: 1 to 64 letters, digits, '-', '_' or '.'
	Role    string // of a client: one of the Role constants
	Tenant  string // of a client; may be empty unless its role is engine
}

const (
	scheme         = "kvtier"
	maxNameBytes   = 64
	maxClusterName = 63 // one label of a host
)

// Validate reports what is wrong with an identity that is somebody's:
// paging.ErrInvalid.
func (id Identity) Validate() error {
	switch {
	case !plainName(id.Cluster, maxClusterName, "-") || id.Cluster[0] == '-' || id.Cluster[len(id.Cluster)-1] == '-':
		return wrong("cluster %q: want 1 to %d letters, digits or '-', which do not begin or end with '-'", id.Cluster, maxClusterName)
	case !plainName(id.Name, maxNameBytes, "-_."):
		return wrong("name %q: want 1 to %d letters, digits, '-', '_' or '.'", id.Name, maxNameBytes)
	case id.Kind == Node && (id.Role != "" || id.Tenant != ""):
		return wrong("a node has neither role nor tenant")
	case id.Kind == Node:
		return nil
	case id.Kind != Client:
		return wrong("%q is neither node nor client", id.Kind)
	case id.Role != RoleEngine && id.Role != RoleOperator && id.Role != RoleReadOnly:
		return wrong("role %q: want %s, %s or %s", id.Role, RoleEngine, RoleOperator, RoleReadOnly)
	case id.Tenant == "" && id.Role == RoleEngine:
		return wrong("an engine needs a tenant: its pages belong to one")
	case id.Tenant != "" && !plainName(id.Tenant, maxNameBytes, "-_."):
		return wrong("tenant %q: want 1 to %d letters, digits, '-', '_' or '.'", id.Tenant, maxNameBytes)
	}
	return nil
}

func wrong(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, paging.ErrInvalid)...)
}

func plainName(s string, most int, others string) bool {
	if s == "" || len(s) > most {
		return false
	}
	for _, r := range s {
		if (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune(others, r) {
			return false
		}
	}
	return true
}

// URI is the identity as it stands in a certificate. The identity is valid.
func (id Identity) URI() *url.URL {
	u := &url.URL{Scheme: scheme, Host: id.Cluster, Path: "/" + string(id.Kind) + "/" + id.Name}
	if id.Kind == Client {
		q := url.Values{"role": {id.Role}}
		if id.Tenant != "" {
			q.Set("tenant", id.Tenant)
		}
		u.RawQuery = q.Encode() // in order of the keys
	}
	return u
}

// String is the URI, or "nobody".
func (id Identity) String() string {
	if id.Kind == Nobody {
		return "nobody"
	}
	return id.URI().String()
}

// Identify reads the identity out of a certificate whose chain was verified.
// Nobody, without an error, where it has no URI of kvtier. paging.ErrInvalid
// where it has two, or one that says something this version does not know.
func Identify(cert *x509.Certificate) (Identity, error) {
	var found Identity
	for _, u := range cert.URIs {
		if u.Scheme != scheme {
			continue
		}
		if found.Kind != Nobody {
			return Identity{}, wrong("certificate names two identities")
		}
		id, err := parse(u)
		if err != nil {
			return Identity{}, fmt.Errorf("certificate names %s: %w", u, err)
		}
		found = id
	}
	return found, nil
}

func parse(u *url.URL) (Identity, error) {
	kind, name, _ := strings.Cut(strings.TrimPrefix(u.Path, "/"), "/")
	q := u.Query()
	id := Identity{Cluster: u.Host, Kind: Kind(kind), Name: name, Role: q.Get("role"), Tenant: q.Get("tenant")}
	if err := id.Validate(); err != nil {
		return Identity{}, err
	}
	// Whatever the fields above do not hold shows as a difference here.
	if id.URI().String() != u.String() {
		return Identity{}, wrong("want %s", id.URI())
	}
	return id, nil
}
