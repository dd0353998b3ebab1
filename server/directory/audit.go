package directory

import (
	"context"
	"fmt"
	"strings"

	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// Bounds of the audit trail.
const (
	maxAudit         = 10_000 // records; the oldest is forgotten
	auditPerRecord   = 1024   // of a snapshot
	maxAuditWho      = 128    // bytes; what is longer is cut off, as of the others
	maxAuditWhat     = 64
	maxAuditSubject  = 160
	maxAuditOutcome  = 256
	byCluster        = "cluster" // who did what the nodes did among themselves
	sessionMoved     = "session moved"
	sessionTakenOver = "session taken over"
	sessionClosed    = "session closed by force"
)

// AuditRecord is a record of the audit trail: immutable.
type AuditRecord = kvtierv1.AuditRecord

// auditLog is the last maxAudit records.
type auditLog struct {
	ring []*AuditRecord // oldest at next once it is full
	next int
	last uint64 // number of the last record
}

func (l *auditLog) add(r *AuditRecord) {
	if len(l.ring) < maxAudit {
		l.ring = append(l.ring, r)
	} else {
		l.ring[l.next] = r
		l.next = (l.next + 1) % maxAudit
	}
	l.last = r.Number
}

// each visits the records, oldest first.
func (l *auditLog) each(f func(*AuditRecord)) {
	for i := range l.ring {
		f(l.ring[(l.next+i)%len(l.ring)])
	}
}

// audit remembers what was done at the time of this command.
func (s *State) audit(who, what, subject, outcome string) {
	s.trail.add(&AuditRecord{
		Number: s.trail.last + 1, UnixMs: s.nowMillis, Who: cut(who, maxAuditWho), What: cut(what, maxAuditWhat),
		Subject: cut(subject, maxAuditSubject), Outcome: cut(outcome, maxAuditOutcome),
	})
}

// cut shortens text to so many bytes of valid UTF-8: records are encoded later, which
// must not fail.
func cut(text string, most int) string {
	return strings.ToValidUTF8(text[:min(len(text), most)], "")
}

// Audit calls f with the records of the audit trail, oldest first. They must not be
// changed.
func (s *State) Audit(f func(*AuditRecord)) { s.trail.each(f) }

func (s *State) appendAudit(c *kvtierv1.AppendAudit) Result {
	if c.GetWho() == "" || c.GetWhat() == "" {
		return Invalid
	}
	s.audit(c.GetWho(), c.GetWhat(), c.GetSubject(), c.GetOutcome())
	return OK
}

// nameOf names a node for people.
func (s *State) nameOf(node []byte) string {
	id, ok := toNodeID(node)
	if n := s.nodes[id]; ok && n != nil && n.Name != "" {
		return n.Name
	}
	return id.Short()
}

// auditOwner remembers that another node owns a session.
func (s *State) auditOwner(what string, from, to *Session) {
	s.audit(byCluster, what, to.GetSession(), fmt.Sprintf("from %s to %s, epoch %d", s.nameOf(from.GetOwner()), s.nameOf(to.GetOwner()), to.GetEpoch()))
}

func (s *State) restoreAudit(r *kvtierv1.AuditRecords) bool {
	for _, x := range r.GetRecords() {
		if x.GetNumber() == 0 || len(s.trail.ring) > 0 && x.GetNumber() != s.trail.last+1 || len(s.trail.ring) == maxAudit {
			return false
		}
		s.trail.add(x)
	}
	return true
}

// auditRecords are the records of the audit trail for a snapshot.
func (l *auditLog) records() (out []*kvtierv1.AuditRecords) {
	l.each(func(r *AuditRecord) {
		n := len(out) - 1
		if n < 0 || len(out[n].Records) == auditPerRecord {
			out = append(out, &kvtierv1.AuditRecords{})
			n++
		}
		out[n].Records = append(out[n].Records, r)
	})
	return out
}

// Audit remembers in the audit trail of the cluster what somebody did. Errors as of
// Propose.
func (d *Directory) Audit(ctx context.Context, who, what, subject, outcome string) error {
	_, err := d.Propose(ctx, &kvtierv1.DirectoryCommand{Command: &kvtierv1.DirectoryCommand_AppendAudit{AppendAudit: &kvtierv1.AppendAudit{
		Who: cut(who, maxAuditWho), What: cut(what, maxAuditWhat), Subject: cut(subject, maxAuditSubject), Outcome: cut(outcome, maxAuditOutcome),
	}}})
	return err
}
