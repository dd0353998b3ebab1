package directory

import (
	"fmt"
	"slices"
	"time"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/placement"
)

// Bounds of the state. A command that would pass one changes nothing and
// answers FULL.
const (
	maxNodes      = 1024  // records of nodes, dead ones included
	maxNamespaces = 65536 // records of namespaces
	maxRequests   = 65536 // request ids remembered; the oldest is forgotten
	maxNameBytes  = 64    // of a node's name
	maxAddrBytes  = 256   // of an address
)

// Result is what a command did.
type Result = kvtierv1.DirectoryResult

// Results, see the wire format for their meaning.
const (
	OK      = kvtierv1.DirectoryResult_DIRECTORY_RESULT_OK
	Stale   = kvtierv1.DirectoryResult_DIRECTORY_RESULT_STALE
	Gap     = kvtierv1.DirectoryResult_DIRECTORY_RESULT_GAP
	Unknown = kvtierv1.DirectoryResult_DIRECTORY_RESULT_UNKNOWN
	Full    = kvtierv1.DirectoryResult_DIRECTORY_RESULT_FULL
	Invalid = kvtierv1.DirectoryResult_DIRECTORY_RESULT_INVALID
)

// Node is what the directory knows of a node.
type Node struct {
	ID          placement.NodeID
	Incarnation placement.Incarnation
	Name        string
	PeerAddress string
	RPCAddress  string
	Capacity    []TierBytes // rising by tier
	State       kvtierv1.NodeState
	SinceMillis int64  // when State was entered
	Sequence    uint64 // last claim sequence applied in this incarnation
	Gap         bool   // a batch is missing: the owner must repair
	Claims      int64  // claims held
	Withdrawal  kvtierv1.Withdrawal

	number  uint16
	digests *[bucketCount]uint64
}

// TierBytes is the budget of one tier.
type TierBytes struct {
	Tier  kvtierv1.Tier
	Bytes uint64
}

// Holder is one answer of Locate.
type Holder struct {
	Node  placement.NodeID
	Parts paging.PartSet
}

// State is the state machine. Not safe for concurrent use: one goroutine
// applies, and readers are kept out meanwhile.
type State struct {
	maxClaims int64
	ruled     bool // a command said what maxClaims is

	nowMillis  int64
	applied    uint64
	nodes      map[placement.NodeID]*Node
	numbers    []*Node // by number; 0 is no node; nil: free
	namespaces map[paging.NamespaceID]namespaceRecord
	claims     claimTable
	sessions   sessionTable
	requests   requestLog
	plans      map[planID]*Plan
	trail      auditLog
}

type namespaceRecord struct {
	encoded     []byte
	sinceMillis int64
}

// NewState returns an empty state that holds at most maxClaims claims, until a command
// says otherwise.
func NewState(maxClaims int64) *State {
	return &State{
		maxClaims:  maxClaims,
		nodes:      map[placement.NodeID]*Node{},
		numbers:    make([]*Node, 1),
		namespaces: map[paging.NamespaceID]namespaceRecord{},
		requests:   requestLog{results: map[requestID]Result{}},
		plans:      map[planID]*Plan{},
	}
}

// Apply does one command. The command is borrowed until it returns. An error
// means a kind of command that this version does not know: the replica must
// stop, as it can no longer follow the others.
func (s *State) Apply(c *kvtierv1.DirectoryCommand) (Result, error) {
	s.nowMillis = max(s.nowMillis, c.GetNowUnixMs())
	if c.GetMaxClaims() > 0 {
		s.maxClaims, s.ruled = c.GetMaxClaims(), true
	}
	s.applied++
	id, named := toRequestID(c.GetRequestId())
	if named {
		if r, done := s.requests.results[id]; done {
			return r, nil
		}
	}
	r, err := s.apply(c)
	if err == nil && named {
		s.requests.add(id, r)
	}
	return r, err
}

func (s *State) apply(c *kvtierv1.DirectoryCommand) (Result, error) {
	switch c := c.GetCommand().(type) {
	case *kvtierv1.DirectoryCommand_ClaimBatch:
		return s.claimBatch(c.ClaimBatch), nil
	case *kvtierv1.DirectoryCommand_ClaimRepair:
		return s.claimRepair(c.ClaimRepair), nil
	case *kvtierv1.DirectoryCommand_DropClaims:
		return s.dropClaims(c.DropClaims), nil
	case *kvtierv1.DirectoryCommand_Tick:
		return OK, nil
	case *kvtierv1.DirectoryCommand_JoinNode:
		return s.joinNode(c.JoinNode), nil
	case *kvtierv1.DirectoryCommand_SetNodeState:
		return s.setNodeState(c.SetNodeState), nil
	case *kvtierv1.DirectoryCommand_RemoveNode:
		return s.removeNode(c.RemoveNode), nil
	case *kvtierv1.DirectoryCommand_PutNamespace:
		return s.putNamespace(c.PutNamespace), nil
	case *kvtierv1.DirectoryCommand_RemoveNamespace:
		return s.removeNamespace(c.RemoveNamespace), nil
	case *kvtierv1.DirectoryCommand_Session:
		return s.session(c.Session), nil
	case *kvtierv1.DirectoryCommand_ExpireSessions:
		return s.expireSessions(c.ExpireSessions), nil
	default:
		return s.applyPlan(c)
	}
}

// applyPlan applies what operators do, and the plans that they start.
func (s *State) applyPlan(c any) (Result, error) {
	switch c := c.(type) {
	case *kvtierv1.DirectoryCommand_StartPlan:
		return s.startPlan(c.StartPlan), nil
	case *kvtierv1.DirectoryCommand_StepPlan:
		return s.stepPlan(c.StepPlan), nil
	case *kvtierv1.DirectoryCommand_RoundPlan:
		return s.roundPlan(c.RoundPlan), nil
	case *kvtierv1.DirectoryCommand_TurnPlan:
		return s.turnPlan(c.TurnPlan), nil
	case *kvtierv1.DirectoryCommand_UndrainNode:
		return s.undrainNode(c.UndrainNode), nil
	case *kvtierv1.DirectoryCommand_AppendAudit:
		return s.appendAudit(c.AppendAudit), nil
	}
	return Invalid, fmt.Errorf("directory command of a kind that this version does not know: upgrade this node: %w", paging.ErrIncompatible)
}

func toNodeID(b []byte) (id placement.NodeID, ok bool) {
	return id, copy(id[:], b) == len(id) && len(b) == len(id)
}

func (s *State) joinNode(c *kvtierv1.JoinNode) Result {
	id, ok := toNodeID(c.GetNode())
	if !ok || c.GetIncarnation() == 0 || len(c.GetName()) > maxNameBytes ||
		len(c.GetPeerAddress()) > maxAddrBytes || len(c.GetRpcAddress()) > maxAddrBytes || len(c.GetCapacity()) > 8 {
		return Invalid
	}
	n := s.nodes[id]
	if n == nil {
		if n = s.addNode(id); n == nil {
			return Full
		}
	}
	inc := placement.Incarnation(c.GetIncarnation())
	if inc < n.Incarnation {
		return Stale
	}
	if inc > n.Incarnation {
		// A new start numbers its batches from 1. Its claims stay: it compares
		// digests and repairs what differs.
		n.Incarnation, n.Sequence, n.Gap = inc, 0, n.Claims > 0
	}
	n.Name, n.PeerAddress, n.RPCAddress = c.GetName(), c.GetPeerAddress(), c.GetRpcAddress()
	n.Capacity = n.Capacity[:0:0]
	for _, t := range c.GetCapacity() {
		n.Capacity = append(n.Capacity, TierBytes{t.GetTier(), t.GetBytes()})
	}
	s.enterSeen(n)
	return OK
}

func (s *State) enter(n *Node, state kvtierv1.NodeState) {
	if n.State != state {
		s.audit(byCluster, "node "+StateName(state), s.nameOf(n.ID[:]), "")
		n.State, n.SinceMillis = state, s.nowMillis
	}
}

// addNode gives the node the smallest free number, so that all replicas agree.
func (s *State) addNode(id placement.NodeID) *Node {
	if len(s.nodes) >= maxNodes {
		return nil
	}
	number := slices.Index(s.numbers[1:], nil) + 1
	if number == 0 {
		number = len(s.numbers)
		s.numbers = append(s.numbers, nil)
	}
	n := &Node{ID: id, number: uint16(number), digests: new([bucketCount]uint64)}
	s.nodes[id] = n
	s.numbers[number] = n
	return n
}

// current finds a node in exactly this incarnation.
func (s *State) current(node []byte, incarnation uint64) (*Node, Result) {
	id, ok := toNodeID(node)
	if !ok {
		return nil, Invalid
	}
	n := s.nodes[id]
	switch {
	case n == nil:
		return nil, Unknown
	case placement.Incarnation(incarnation) < n.Incarnation:
		return nil, Stale
	case placement.Incarnation(incarnation) > n.Incarnation:
		return nil, Unknown
	}
	return n, OK
}

func (s *State) setNodeState(c *kvtierv1.SetNodeState) Result {
	n, r := s.current(c.GetNode(), c.GetIncarnation())
	if n == nil {
		return r
	}
	if _, known := kvtierv1.NodeState_name[int32(c.GetState())]; !known || c.GetState() == kvtierv1.NodeState_NODE_STATE_UNSPECIFIED {
		return Invalid
	}
	switch c.GetState() {
	case kvtierv1.NodeState_NODE_STATE_UP: // it is seen, which does not undo what an operator said
		s.enterSeen(n)
	case kvtierv1.NodeState_NODE_STATE_DRAINING:
		n.Withdrawal = kvtierv1.Withdrawal_WITHDRAWAL_DRAINING
		s.enter(n, c.GetState())
	default:
		s.enter(n, c.GetState())
	}
	return OK
}

func (s *State) removeNode(c *kvtierv1.RemoveNode) Result {
	id, ok := toNodeID(c.GetNode())
	if !ok {
		return Invalid
	}
	n := s.nodes[id]
	switch {
	case n == nil:
		return OK
	case n.State == kvtierv1.NodeState_NODE_STATE_UP || n.State == kvtierv1.NodeState_NODE_STATE_DRAINING || n.Claims > 0:
		return Stale
	}
	delete(s.nodes, id)
	s.numbers[n.number] = nil
	return OK
}

func (s *State) putNamespace(c *kvtierv1.PutNamespace) Result {
	ns, err := paging.DecodeNamespace(c.GetNamespace())
	if err != nil {
		return Invalid
	}
	id := ns.ID()
	if rec, known := s.namespaces[id]; known {
		if s.nowMillis-rec.sinceMillis >= namespaceFresh.Milliseconds() {
			rec.sinceMillis = s.nowMillis
			s.namespaces[id] = rec
		}
		return OK
	}
	if len(s.namespaces) >= maxNamespaces {
		return Full
	}
	s.namespaces[id] = namespaceRecord{encoded: slices.Clone(c.GetNamespace()), sinceMillis: s.nowMillis}
	return OK
}

// namespaceFresh is how long a namespace that is named again is left as it is: not
// every announcement changes the state.
const namespaceFresh = time.Hour

func (s *State) removeNamespace(c *kvtierv1.RemoveNamespace) Result {
	var id paging.NamespaceID
	if len(c.GetNamespaceId()) != len(id) {
		return Invalid
	}
	copy(id[:], c.GetNamespaceId())
	if rec, known := s.namespaces[id]; known && c.GetPutBeforeUnixMs() != 0 && rec.sinceMillis >= c.GetPutBeforeUnixMs() {
		return Stale // named again meanwhile
	}
	delete(s.namespaces, id)
	return OK
}
