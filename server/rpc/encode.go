package rpc

import (
	"encoding/binary"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// optionalDuration is absent for 0.
func optionalDuration(d time.Duration) *durationpb.Duration {
	if d == 0 {
		return nil
	}
	return durationpb.New(d)
}

// encodeFetch fills out with res, whose slices it borrows until out is sent.
func encodeFetch(res *FetchResult, out *kvtierv1.FetchResponse) {
	out.LeaseId = res.Lease
	out.UsableBlocks = uint32(res.Usable)
	out.UsableTokens = res.Tokens
	out.Slots = res.Slots
	out.Parts = uint64(res.Parts)
	out.Tiers = res.Tiers
	out.Shortfalls = encodeShort(res.Short)
	out.AdoptToken = nil
	if res.Token != nil {
		out.AdoptToken = res.Token[:]
	}
	encodeTTL(res.TTL, out)
}

// encodeTTL uses the duration of the last answer again.
func encodeTTL(ttl time.Duration, out *kvtierv1.FetchResponse) {
	switch {
	case ttl == 0:
		out.LeaseTtl = nil
	case out.LeaseTtl == nil:
		out.LeaseTtl = durationpb.New(ttl)
	default:
		out.LeaseTtl.Seconds = int64(ttl / time.Second)
		out.LeaseTtl.Nanos = int32(ttl % time.Second)
	}
}

func encodeShort(short []Shortfall) []*kvtierv1.Shortfall {
	if len(short) == 0 {
		return nil
	}
	out := make([]*kvtierv1.Shortfall, len(short))
	for i, s := range short {
		out[i] = &kvtierv1.Shortfall{
			Block: uint32(s.Block), Count: uint32(s.Count), Reason: kvtierv1.Reason(s.Reason),
			RetryAfter: optionalDuration(s.RetryAfter),
		}
	}
	return out
}

func encodeAdopt(res *FetchResult, out *kvtierv1.AdoptResponse) {
	out.LeaseId = res.Lease
	out.UsableBlocks = uint32(res.Usable)
	out.Slots = res.Slots
	out.Parts = uint64(res.Parts)
}

func encodeWelcome(w *Welcome) *kvtierv1.Welcome {
	out := &kvtierv1.Welcome{
		Attachment: w.Attachment[:], ProtocolVersion: kvstatus.ProtocolVersion, Node: w.Node[:], Incarnation: w.Incarnation,
		HandoffSocket: w.HandoffSocket, Tenant: w.Tenant, StagingExtent: uint32(w.StagingExtent),
		StagingBytes: w.StagingBytes, LeaseTtl: durationpb.New(w.LeaseTTL),
		WorkingExtent: uint32(w.WorkingExtent), WorkingBytes: w.WorkingBytes,
	}
	for _, a := range w.Arenas {
		out.Arenas = append(out.Arenas, &kvtierv1.Arena{Id: a.ID, Tier: kvtierv1.Tier(a.Tier), Device: a.Device, SlotAlignBytes: a.SlotAlign,
			ExtentBytes: a.ExtentBytes, Places: a.Places, DeviceUuid: a.DeviceUUID, DeviceName: a.DeviceName})
	}
	return out
}

func encodeExtents(extents []Extent) *kvtierv1.ExtentsAdded {
	out := &kvtierv1.ExtentsAdded{}
	for _, e := range extents {
		out.Extents = append(out.Extents, &kvtierv1.Extent{Id: uint32(e.ID), Arena: e.Arena, Bytes: e.Bytes})
	}
	return out
}

func encodeProgress(p *Progress) *kvtierv1.PrefetchProgress {
	ready := make([]byte, 0, 4*len(p.Ready))
	for _, i := range p.Ready {
		ready = binary.LittleEndian.AppendUint32(ready, i)
	}
	return &kvtierv1.PrefetchProgress{Ticket: p.Ticket, Ready: ready, Done: p.Done, Reason: kvtierv1.Reason(p.Reason)}
}
