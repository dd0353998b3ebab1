package rpc

import (
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"strings"

	"github.com/kvtier/kvtier/paging"
)

// Role is what a caller may do.
type Role uint8

// Roles. An engine reads and writes pages of its tenant; a read-only caller asks
// the AdminService; an operator does both.
const (
	RoleEngine Role = iota + 1
	RoleReadOnly
	RoleOperator
)

// ParseRole reads "engine", "read-only" or "operator"; empty is engine.
func ParseRole(s string) (Role, error) {
	switch s {
	case "", "engine":
		return RoleEngine, nil
	case "read-only":
		return RoleReadOnly, nil
	case "operator":
		return RoleOperator, nil
	}
	return 0, fmt.Errorf("role %q: use engine, operator or read-only: %w", s, paging.ErrInvalid)
}

// DefaultTenant is the tenant of every caller when no tenant is configured.
const DefaultTenant = "default"

// Caller is who is on the other end, as authenticated.
type Caller struct {
	Tenant string
	Role   Role
	Admin  bool   // may use the AdminService
	Node   string // name of the node of this cluster that it is; "": it is none
	Local  bool   // came over the unix socket
	UID    uint32
	PID    int32
	Name   string // of the client that its certificate names; "": it shows none
}

// String says who that is, for the audit trail.
func (c Caller) String() string {
	role := [...]string{"nobody", "engine", "read-only", "operator"}[c.Role]
	switch {
	case c.Node != "":
		return "node " + c.Node
	case c.Name != "":
		return fmt.Sprintf("client %s (%s)", c.Name, role)
	case c.Local && c.Admin && c.Role != RoleOperator:
		return fmt.Sprintf("uid %d", c.UID)
	case c.Local:
		return fmt.Sprintf("%s of tenant %s, uid %d", role, c.Tenant, c.UID)
	}
	return fmt.Sprintf("%s of tenant %s", role, c.Tenant)
}

// Account is one way to be recognised.
type Account struct {
	Tenant string
	UIDs   []uint32
	Tokens []Token
}

// Token is a bearer token and its role.
type Token struct {
	Secret string
	Role   Role
}

// Accounts recognises callers. Immutable.
type Accounts struct {
	open   bool // no tenant is configured: everybody is DefaultTenant
	owner  uint32
	byUID  map[uint32]string
	names  map[string]bool // tenants
	tokens []hashedToken
}

// Holder is who a certificate names. The zero Holder is nobody.
type Holder struct {
	Node   string // of a node: its name
	Tenant string // of a client; "" for one that has none
	Role   Role   // of a client
	Name   string // of a client
}

type hashedToken struct {
	sum    [sha256.Size]byte
	tenant string
	role   Role
}

// NewAccounts makes the table. owner is the uid that owns the unix socket: it,
// and root, may use the AdminService there.
func NewAccounts(accounts []Account, owner uint32) *Accounts {
	a := &Accounts{open: len(accounts) == 0, owner: owner, byUID: map[uint32]string{}, names: map[string]bool{}}
	for _, acc := range accounts {
		a.names[acc.Tenant] = true
		for _, uid := range acc.UIDs {
			a.byUID[uid] = acc.Tenant
		}
		for _, t := range acc.Tokens {
			a.tokens = append(a.tokens, hashedToken{sha256.Sum256([]byte(t.Secret)), acc.Tenant, t.Role})
		}
	}
	return a
}

// local recognises the peer of a unix socket. A caller without a tenant may
// still use the AdminService if it is root or the owner.
func (a *Accounts) local(uid uint32, pid int32) Caller {
	c := Caller{Local: true, UID: uid, PID: pid, Admin: uid == 0 || uid == a.owner}
	if a.open {
		c.Tenant, c.Role = DefaultTenant, RoleEngine
	} else if t, ok := a.byUID[uid]; ok {
		c.Tenant, c.Role = t, RoleEngine
	}
	return c
}

// remote is the caller of a TCP connection before its token is seen.
func (a *Accounts) remote() Caller {
	if a.open {
		return Caller{Tenant: DefaultTenant, Role: RoleEngine}
	}
	return Caller{}
}

// certified is the caller whose certificate names h. Where tenants are
// configured, only those exist.
func (a *Accounts) certified(h Holder) (Caller, error) {
	if h.Node != "" {
		return Caller{Node: h.Node}, nil
	}
	if h.Tenant != "" && !a.open && !a.names[h.Tenant] {
		return Caller{}, fmt.Errorf("tenant %q of the certificate is not configured here: %w", h.Tenant, paging.ErrDenied)
	}
	return Caller{Tenant: h.Tenant, Role: h.Role, Admin: h.Role.admin(), Name: h.Name}, nil
}

func (r Role) admin() bool { return r == RoleOperator || r == RoleReadOnly }

// Bearer is the caller of an HTTP request with this authorization header, which may
// be left out where no tenant is configured.
func (a *Accounts) Bearer(header string) (Caller, error) {
	c := a.remote()
	if a.open {
		c.Admin = true // the only tenant there is
		return c, nil
	}
	return a.withToken(c, header)
}

// withToken replaces what is known of c by what the authorization header says.
// All tokens are compared, each in constant time.
func (a *Accounts) withToken(c Caller, header string) (Caller, error) {
	secret, ok := strings.CutPrefix(header, "Bearer ")
	if !ok {
		return c, fmt.Errorf("authorization header: want \"Bearer <token>\": %w", paging.ErrDenied)
	}
	sum := sha256.Sum256([]byte(secret))
	found := -1
	for i := range a.tokens {
		if subtle.ConstantTimeCompare(sum[:], a.tokens[i].sum[:]) == 1 {
			found = i
		}
	}
	if found < 0 {
		return c, fmt.Errorf("token not known: %w", paging.ErrDenied)
	}
	t := a.tokens[found]
	c.Tenant, c.Role, c.Node, c.Name = t.tenant, t.role, "", ""
	c.Admin = t.role.admin()
	return c, nil
}
