package client

import (
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// Tier is a medium that holds pages.
type Tier uint8

// The tiers; TierNone is "not stored", or the default of a request.
const (
	TierNone   = Tier(kvtierv1.Tier_TIER_UNSPECIFIED)
	TierHBM    = Tier(kvtierv1.Tier_TIER_HBM)
	TierRAM    = Tier(kvtierv1.Tier_TIER_RAM)
	TierNVMe   = Tier(kvtierv1.Tier_TIER_NVME)
	TierRemote = Tier(kvtierv1.Tier_TIER_REMOTE)
)

// String is the lower-case name.
func (t Tier) String() string {
	if t == TierNone {
		return "none"
	}
	return word(kvtierv1.Tier(t).String(), "TIER_")
}

// Reason says why a block is not served.
type Reason uint8

// The reasons; ReasonNone is "no reason applies".
const (
	ReasonNone            = Reason(kvtierv1.Reason_REASON_UNSPECIFIED)
	ReasonNotFound        = Reason(kvtierv1.Reason_REASON_NOT_FOUND)
	ReasonPartMissing     = Reason(kvtierv1.Reason_REASON_PART_MISSING)
	ReasonNoSpace         = Reason(kvtierv1.Reason_REASON_NO_SPACE)
	ReasonOverQuota       = Reason(kvtierv1.Reason_REASON_OVER_QUOTA)
	ReasonTimeout         = Reason(kvtierv1.Reason_REASON_TIMEOUT)
	ReasonCorrupt         = Reason(kvtierv1.Reason_REASON_CORRUPT)
	ReasonIdentity        = Reason(kvtierv1.Reason_REASON_IDENTITY_MISMATCH)
	ReasonIO              = Reason(kvtierv1.Reason_REASON_IO_ERROR)
	ReasonInFlight        = Reason(kvtierv1.Reason_REASON_IN_FLIGHT)
	ReasonStopping        = Reason(kvtierv1.Reason_REASON_STOPPING)
	ReasonCancelled       = Reason(kvtierv1.Reason_REASON_CANCELLED)
	ReasonAttachmentEnded = Reason(kvtierv1.Reason_REASON_ATTACHMENT_ENDED)
)

// String is the lower-case name.
func (r Reason) String() string {
	if r == ReasonNone {
		return "none"
	}
	return word(kvtierv1.Reason(r).String(), "REASON_")
}

// Outcome is what happened to one block of a write.
type Outcome uint8

// The outcomes; OutcomeNotReached is a block before which room ran out.
const (
	OutcomeNotReached         = Outcome(kvtierv1.WriteOutcome_WRITE_OUTCOME_UNSPECIFIED)
	OutcomeGranted            = Outcome(kvtierv1.WriteOutcome_WRITE_OUTCOME_GRANTED)
	OutcomeExists             = Outcome(kvtierv1.WriteOutcome_WRITE_OUTCOME_EXISTS)
	OutcomeInFlight           = Outcome(kvtierv1.WriteOutcome_WRITE_OUTCOME_IN_FLIGHT)
	OutcomeStagingFull        = Outcome(kvtierv1.WriteOutcome_WRITE_OUTCOME_STAGING_FULL)
	OutcomeNoSpace            = Outcome(kvtierv1.WriteOutcome_WRITE_OUTCOME_NO_SPACE)
	OutcomeOverQuota          = Outcome(kvtierv1.WriteOutcome_WRITE_OUTCOME_OVER_QUOTA)
	OutcomeCommitted          = Outcome(kvtierv1.WriteOutcome_WRITE_OUTCOME_COMMITTED)
	OutcomeDuplicate          = Outcome(kvtierv1.WriteOutcome_WRITE_OUTCOME_DUPLICATE)
	OutcomeDuplicateDivergent = Outcome(kvtierv1.WriteOutcome_WRITE_OUTCOME_DUPLICATE_DIVERGENT)
	OutcomeExpired            = Outcome(kvtierv1.WriteOutcome_WRITE_OUTCOME_EXPIRED)
	OutcomeNotDurable         = Outcome(kvtierv1.WriteOutcome_WRITE_OUTCOME_NOT_DURABLE)
	OutcomeCorrupt            = Outcome(kvtierv1.WriteOutcome_WRITE_OUTCOME_CORRUPT)
	OutcomeRepeated           = Outcome(kvtierv1.WriteOutcome_WRITE_OUTCOME_REPEATED)
)

// String is the lower-case name.
func (o Outcome) String() string {
	if o == OutcomeNotReached {
		return "not_reached"
	}
	return word(kvtierv1.WriteOutcome(o).String(), "WRITE_OUTCOME_")
}

// Stored reports whether the block is stored now, whoever wrote it.
func (o Outcome) Stored() bool {
	switch o {
	case OutcomeExists, OutcomeCommitted, OutcomeDuplicate, OutcomeDuplicateDivergent, OutcomeNotDurable:
		return true
	default:
		return false
	}
}

// ItemOutcome is what a retention verb did to one block.
type ItemOutcome uint8

// The outcomes of retention verbs.
const (
	ItemAccepted = ItemOutcome(kvtierv1.ItemOutcome_ITEM_OUTCOME_ACCEPTED)
	ItemClipped  = ItemOutcome(kvtierv1.ItemOutcome_ITEM_OUTCOME_CLIPPED)
	ItemDeferred = ItemOutcome(kvtierv1.ItemOutcome_ITEM_OUTCOME_DEFERRED)
	ItemRejected = ItemOutcome(kvtierv1.ItemOutcome_ITEM_OUTCOME_REJECTED)
	ItemMissing  = ItemOutcome(kvtierv1.ItemOutcome_ITEM_OUTCOME_MISSING)
)

// String is the lower-case name.
func (o ItemOutcome) String() string {
	return word(kvtierv1.ItemOutcome(o).String(), "ITEM_OUTCOME_")
}

func word(name, prefix string) string {
	return strings.ToLower(strings.TrimPrefix(name, prefix))
}

// Shortfall says why Count consecutive blocks from Block (counted from the first
// named one) were not granted.
type Shortfall struct {
	Block, Count int
	Reason       Reason
	RetryAfter   time.Duration // 0: unknown
}

func shortfalls(in []*kvtierv1.Shortfall) []Shortfall {
	if len(in) == 0 {
		return nil
	}
	out := make([]Shortfall, len(in))
	for i, s := range in {
		out[i] = Shortfall{
			Block: int(s.GetBlock()), Count: int(s.GetCount()), Reason: Reason(s.GetReason()), //nolint:gosec // reasons fit a byte
			RetryAfter: s.GetRetryAfter().AsDuration(),
		}
	}
	return out
}

// Retention says how long blocks are worth keeping.
type Retention struct {
	Priority     int           // 0, as blocks that nobody retained, to 100
	TTL          time.Duration // after it the block is an ordinary one; 0: never
	RefreshOnHit bool          // a hit starts TTL again
}

func (r *Retention) wire() (*kvtierv1.Retention, error) {
	if r == nil {
		return nil, nil //nolint:nilnil // absent stays absent
	}
	if r.Priority < 0 || r.Priority > 100 || r.TTL < 0 {
		return nil, fmt.Errorf("retention priority %d, ttl %v: want 0 to 100 and no negative time: %w", r.Priority, r.TTL, paging.ErrInvalid)
	}
	return &kvtierv1.Retention{Priority: uint32(r.Priority), Ttl: span(r.TTL), RefreshOnHit: r.RefreshOnHit}, nil
}

// span is absent for 0, which every request reads as its default.
func span(d time.Duration) *durationpb.Duration {
	if d <= 0 {
		return nil
	}
	return durationpb.New(d)
}

// octets turns one byte per item into its type.
func octets[T ~uint8](in []byte) []T {
	out := make([]T, len(in))
	for i, b := range in {
		out[i] = T(b)
	}
	return out
}

// pack concatenates block names. ErrInvalid for none or too many.
func pack(names []paging.BlockName) ([]byte, error) {
	if len(names) == 0 || len(names) > paging.MaxCallBlocks {
		return nil, fmt.Errorf("%d block names, want 1 to %d: %w", len(names), paging.MaxCallBlocks, paging.ErrInvalid)
	}
	b := make([]byte, 0, len(names)*len(paging.BlockName{}))
	for i := range names {
		b = append(b, names[i][:]...)
	}
	return b, nil
}
