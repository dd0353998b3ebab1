package directory

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"slices"

	"google.golang.org/protobuf/encoding/protodelim"
	"google.golang.org/protobuf/proto"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/placement"
)

// snapshotVersion is the format that Write writes and Restore reads.
const snapshotVersion = 1

// Lengths of snapshot records.
const (
	claimRecordBytes   = 26      // key 16, parts 8, node 2
	claimsPerRecord    = 8192    // 208 KiB a record
	maxSnapshotRecord  = 4 << 20 // a longer one is damage
	requestsPerRecord  = 16384
	maxSnapshotRecords = 1 << 24
)

// Snapshot is the state at one moment. It stays valid while commands are
// applied; the claims that change meanwhile are copied shard by shard.
type Snapshot struct {
	header     *kvtierv1.SnapshotHeader
	nodes      []*kvtierv1.NodeRecord
	namespaces []*kvtierv1.NamespaceRecord
	requests   []*kvtierv1.RequestsRecord
	claims     *[shardCount][]claim
	sessions   *[shardCount]map[string]*Session
	plans      []*Plan
	audit      []*kvtierv1.AuditRecords
}

// Snapshot captures the state. It copies everything but claims, whose shards it
// shares until they are written next.
func (s *State) Snapshot() *Snapshot {
	snap := &Snapshot{
		header: &kvtierv1.SnapshotHeader{Version: snapshotVersion, NowUnixMs: s.nowMillis, Applied: s.applied, ClosedEpoch: s.sessions.closed},
		claims: s.claims.freeze(), sessions: s.sessions.freeze(),
		plans: s.Plans(), audit: s.trail.records(),
	}
	if s.ruled {
		snap.header.MaxClaims = s.maxClaims
	}
	for _, n := range s.numbers {
		if n != nil {
			snap.nodes = append(snap.nodes, n.record())
		}
	}
	for _, ns := range s.namespaces {
		snap.namespaces = append(snap.namespaces, &kvtierv1.NamespaceRecord{Namespace: ns.encoded, SinceUnixMs: ns.sinceMillis})
	}
	slices.SortFunc(snap.namespaces, func(a, b *kvtierv1.NamespaceRecord) int { return bytes.Compare(a.Namespace, b.Namespace) })
	s.requests.each(func(id requestID, r Result) {
		last := len(snap.requests) - 1
		if last < 0 || len(snap.requests[last].Results) == requestsPerRecord {
			snap.requests = append(snap.requests, &kvtierv1.RequestsRecord{})
			last++
		}
		rec := snap.requests[last]
		rec.RequestIds = append(rec.RequestIds, id[:]...)
		rec.Results = append(rec.Results, byte(r))
	})
	return snap
}

func (n *Node) record() *kvtierv1.NodeRecord {
	joined := &kvtierv1.JoinNode{
		Node: slices.Clone(n.ID[:]), Incarnation: uint64(n.Incarnation), Name: n.Name,
		PeerAddress: n.PeerAddress, RpcAddress: n.RPCAddress,
	}
	for _, t := range n.Capacity {
		joined.Capacity = append(joined.Capacity, &kvtierv1.TierCapacity{Tier: t.Tier, Bytes: t.Bytes})
	}
	return &kvtierv1.NodeRecord{
		Joined: joined, State: n.State, SinceUnixMs: n.SinceMillis, Sequence: n.Sequence, Gap: n.Gap, Number: uint32(n.number),
		Withdrawal: n.Withdrawal,
	}
}

// recordWriter writes records and hashes what it writes.
type recordWriter struct {
	w    io.Writer
	hash hash.Hash
}

func (w *recordWriter) write(r *kvtierv1.DirectoryRecord) error {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(r)
	if err != nil {
		return err
	}
	frame := binary.AppendUvarint(make([]byte, 0, len(b)+binary.MaxVarintLen32), uint64(len(b)))
	frame = append(frame, b...)
	w.hash.Write(frame)
	_, err = w.w.Write(frame)
	return err
}

// Write streams the snapshot. The same state gives the same bytes on every
// replica. It may run beside Apply, from one goroutine.
func (snap *Snapshot) Write(out io.Writer) error {
	w := &recordWriter{w: out, hash: sha256.New()}
	for record := range snap.records() {
		if err := w.write(record); err != nil {
			return fmt.Errorf("write directory snapshot: %w", err)
		}
	}
	end := &kvtierv1.DirectoryRecord{Record: &kvtierv1.DirectoryRecord_End{End: &kvtierv1.SnapshotEnd{StateHash: w.hash.Sum(nil)}}}
	if err := w.write(end); err != nil {
		return fmt.Errorf("write directory snapshot: %w", err)
	}
	return nil
}

// records yields all records but the end, in their order.
func (snap *Snapshot) records() func(yield func(*kvtierv1.DirectoryRecord) bool) {
	return func(yield func(*kvtierv1.DirectoryRecord) bool) {
		if !yield(&kvtierv1.DirectoryRecord{Record: &kvtierv1.DirectoryRecord_Header{Header: snap.header}}) {
			return
		}
		for _, n := range snap.nodes {
			if !yield(&kvtierv1.DirectoryRecord{Record: &kvtierv1.DirectoryRecord_Node{Node: n}}) {
				return
			}
		}
		for _, ns := range snap.namespaces {
			if !yield(&kvtierv1.DirectoryRecord{Record: &kvtierv1.DirectoryRecord_Namespace{Namespace: ns}}) {
				return
			}
		}
		for _, r := range snap.requests {
			if !yield(&kvtierv1.DirectoryRecord{Record: &kvtierv1.DirectoryRecord_Requests{Requests: r}}) {
				return
			}
		}
		for _, shard := range snap.sessions {
			for _, x := range sortedSessions(shard) {
				if !yield(&kvtierv1.DirectoryRecord{Record: &kvtierv1.DirectoryRecord_Session{Session: x}}) {
					return
				}
			}
		}
		for _, p := range snap.plans {
			if !yield(&kvtierv1.DirectoryRecord{Record: &kvtierv1.DirectoryRecord_Plan{Plan: p}}) {
				return
			}
		}
		for _, a := range snap.audit {
			if !yield(&kvtierv1.DirectoryRecord{Record: &kvtierv1.DirectoryRecord_Audit{Audit: a}}) {
				return
			}
		}
		for shard := range snap.claims {
			for part := range slices.Chunk(sortedClaims(snap.claims[shard]), claimsPerRecord) {
				if !yield(&kvtierv1.DirectoryRecord{Record: &kvtierv1.DirectoryRecord_Claims{Claims: encodeClaims(shard, part)}}) {
					return
				}
			}
		}
	}
}

func encodeClaims(shard int, claims []claim) *kvtierv1.ClaimsRecord {
	b := make([]byte, 0, len(claims)*claimRecordBytes)
	for i := range claims {
		b = append(b, claims[i].key[:]...)
		b = binary.LittleEndian.AppendUint64(b, uint64(claims[i].parts))
		b = binary.LittleEndian.AppendUint16(b, claims[i].node)
	}
	return &kvtierv1.ClaimsRecord{Shard: uint32(shard), Claims: b}
}

// Hash is the hash of the whole state, equal on replicas that applied the same
// commands. It costs as much as writing a snapshot.
func (s *State) Hash() [sha256.Size]byte {
	w := &recordWriter{w: io.Discard, hash: sha256.New()}
	for record := range s.Snapshot().records() {
		if err := w.write(record); err != nil {
			panic(err) // io.Discard takes all, and every record can be encoded
		}
	}
	return [sha256.Size]byte(w.hash.Sum(nil))
}

// Restore returns the state in a snapshot. A snapshot that is short, damaged or
// of another version is an error that says which; nothing of it is used.
func Restore(r io.Reader, maxClaims int64) (*State, error) {
	s := NewState(maxClaims)
	if err := readRecords(r, s.restore); err != nil {
		return nil, err
	}
	return s, nil
}

// readRecords visits the records of a snapshot in their order, all but the end,
// whose hash it compares.
func readRecords(r io.Reader, visit func(i int, record *kvtierv1.DirectoryRecord) error) error {
	in := &hashingReader{r: r, hash: sha256.New()}
	for i := 0; i < maxSnapshotRecords; i++ {
		before := in.sum()
		record := &kvtierv1.DirectoryRecord{}
		if err := (protodelim.UnmarshalOptions{MaxSize: maxSnapshotRecord}).UnmarshalFrom(in, record); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return fmt.Errorf("directory snapshot, record %d: %w: %w", i, err, paging.ErrCorrupt)
		}
		if end := record.GetEnd(); end != nil {
			if i == 0 || !bytes.Equal(end.GetStateHash(), before) {
				return fmt.Errorf("directory snapshot: hash over %d records does not match: %w", i, paging.ErrCorrupt)
			}
			return nil
		}
		if (i == 0) != (record.GetHeader() != nil) {
			return fmt.Errorf("directory snapshot, record %d: header out of place: %w", i, paging.ErrCorrupt)
		}
		if v := record.GetHeader().GetVersion(); i == 0 && v != snapshotVersion {
			return fmt.Errorf("directory snapshot: format version %d, this program reads %d: %w", v, snapshotVersion, paging.ErrIncompatible)
		}
		if err := visit(i, record); err != nil {
			return fmt.Errorf("directory snapshot, record %d: %w", i, err)
		}
	}
	return fmt.Errorf("directory snapshot has no end: %w", paging.ErrCorrupt)
}

func (s *State) restore(_ int, record *kvtierv1.DirectoryRecord) error {
	switch r := record.GetRecord().(type) {
	case *kvtierv1.DirectoryRecord_Header:
		s.nowMillis, s.applied, s.sessions.closed = r.Header.GetNowUnixMs(), r.Header.GetApplied(), r.Header.GetClosedEpoch()
		if r.Header.GetMaxClaims() > 0 {
			s.maxClaims, s.ruled = r.Header.GetMaxClaims(), true
		}
		return nil
	case *kvtierv1.DirectoryRecord_Node:
		return s.restoreNode(r.Node)
	case *kvtierv1.DirectoryRecord_Namespace:
		ns, err := paging.DecodeNamespace(r.Namespace.GetNamespace())
		if err != nil {
			return err
		}
		s.namespaces[ns.ID()] = namespaceRecord{r.Namespace.GetNamespace(), r.Namespace.GetSinceUnixMs()}
		return nil
	case *kvtierv1.DirectoryRecord_Requests:
		return s.restoreRequests(r.Requests)
	case *kvtierv1.DirectoryRecord_Claims:
		return s.restoreClaims(r.Claims)
	case *kvtierv1.DirectoryRecord_Session:
		if !s.restoreSession(r.Session) {
			return fmt.Errorf("session record: %w", paging.ErrCorrupt)
		}
		return nil
	case *kvtierv1.DirectoryRecord_Plan:
		if !s.restorePlan(r.Plan) {
			return fmt.Errorf("plan record: %w", paging.ErrCorrupt)
		}
		return nil
	case *kvtierv1.DirectoryRecord_Audit:
		if !s.restoreAudit(r.Audit) {
			return fmt.Errorf("audit record: %w", paging.ErrCorrupt)
		}
		return nil
	}
	return fmt.Errorf("record of a kind that this version does not know: upgrade this node: %w", paging.ErrIncompatible)
}

func (s *State) restoreNode(r *kvtierv1.NodeRecord) error {
	id, ok := toNodeID(r.GetJoined().GetNode())
	number := int(r.GetNumber())
	if !ok || number < 1 || number > maxNodes || s.nodes[id] != nil || number < len(s.numbers) && s.numbers[number] != nil {
		return fmt.Errorf("node record: %w", paging.ErrCorrupt)
	}
	for len(s.numbers) <= number {
		s.numbers = append(s.numbers, nil)
	}
	j := r.GetJoined()
	n := &Node{
		ID: id, Incarnation: placement.Incarnation(j.GetIncarnation()), Name: j.GetName(), PeerAddress: j.GetPeerAddress(), RPCAddress: j.GetRpcAddress(),
		State: r.GetState(), SinceMillis: r.GetSinceUnixMs(), Sequence: r.GetSequence(), Gap: r.GetGap(), Withdrawal: r.GetWithdrawal(),
		number: uint16(number), digests: new([bucketCount]uint64),
	}
	for _, t := range j.GetCapacity() {
		n.Capacity = append(n.Capacity, TierBytes{t.GetTier(), t.GetBytes()})
	}
	s.nodes[id], s.numbers[number] = n, n
	return nil
}

func (s *State) restoreRequests(r *kvtierv1.RequestsRecord) error {
	ids := r.GetRequestIds()
	if len(ids) != len(requestID{})*len(r.GetResults()) || len(s.requests.ring)+len(r.GetResults()) > maxRequests {
		return fmt.Errorf("requests record: %w", paging.ErrCorrupt)
	}
	for i, result := range r.GetResults() {
		s.requests.add(requestID(ids[16*i:]), Result(result))
	}
	return nil
}

func (s *State) restoreClaims(r *kvtierv1.ClaimsRecord) error {
	b := r.GetClaims()
	if len(b)%claimRecordBytes != 0 {
		return fmt.Errorf("claims record: %w", paging.ErrCorrupt)
	}
	for ; len(b) > 0; b = b[claimRecordBytes:] {
		k, parts := decodeChange(b)
		number := int(binary.LittleEndian.Uint16(b[changeBytes:]))
		if number >= len(s.numbers) || s.numbers[number] == nil || parts == 0 || shardOf(k) != int(r.GetShard()) {
			return fmt.Errorf("claim of %v by node number %d: %w", k, number, paging.ErrCorrupt)
		}
		s.set(s.numbers[number], k, parts)
	}
	return nil
}

// hashingReader hashes what is read from it. It reads no byte ahead.
type hashingReader struct {
	r    io.Reader
	hash hash.Hash
	one  [1]byte
}

func (h *hashingReader) Read(p []byte) (int, error) {
	n, err := h.r.Read(p)
	h.hash.Write(p[:n])
	return n, err
}

// ReadByte makes it the io.ByteReader that length prefixes are read from.
func (h *hashingReader) ReadByte() (byte, error) {
	_, err := io.ReadFull(h, h.one[:])
	return h.one[0], err
}

func (h *hashingReader) sum() []byte { return h.hash.Sum(nil) }
