package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc"

	"github.com/kvtier/kvtier/paging"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
	"github.com/kvtier/kvtier/server/directory"
)

// snapshotPiece is how much of a snapshot is sent in one message.
const snapshotPiece = 256 << 10

var errAlone = fmt.Errorf("this node is alone: it has no directory: %w", paging.ErrUnavailable)

// SaveSnapshot streams the directory of the cluster as this node has it.
func (s *admin) SaveSnapshot(_ *kvtierv1.SaveSnapshotRequest, stream grpc.ServerStreamingServer[kvtierv1.SaveSnapshotResponse]) error {
	if s.node.cluster == nil {
		return errAlone
	}
	return s.node.cluster.Directory().SaveSnapshot(pieces{stream})
}

// pieces sends what is written to it.
type pieces struct {
	stream grpc.ServerStreamingServer[kvtierv1.SaveSnapshotResponse]
}

// Write implements io.Writer.
func (p pieces) Write(b []byte) (n int, err error) {
	for n < len(b) {
		piece := b[n:min(len(b), n+snapshotPiece)]
		if err := p.stream.Send(&kvtierv1.SaveSnapshotResponse{Data: piece}); err != nil {
			return n, err
		}
		n += len(piece)
	}
	return n, nil
}

// RestoreSnapshot replaces the directory of the cluster.
func (s *admin) RestoreSnapshot(stream grpc.ClientStreamingServer[kvtierv1.RestoreSnapshotRequest, kvtierv1.RestoreSnapshotResponse]) error {
	if s.node.cluster == nil {
		return errAlone
	}
	d := s.node.cluster.Directory()
	awaitLeader(stream.Context(), d)
	err := d.RestoreSnapshot(stream.Context(), &received{stream: stream})
	if leader, led := d.Leader(); errors.Is(err, paging.ErrUnavailable) && led {
		info, _ := s.node.cluster.Members().View().Find(leader)
		return fmt.Errorf("%w: ask the node that leads, %s (%s)", err, info.Name, leader.Short())
	}
	if err != nil {
		return err
	}
	out := &kvtierv1.RestoreSnapshotResponse{}
	d.Read(func(s *directory.State) { out.Nodes, out.Claims = uint32(len(s.Nodes())), uint64(s.Claims()) })
	return stream.SendAndClose(out)
}

// Times of waiting for a leader: a node that just started elects one, be it itself.
const (
	leaderWithin = 5 * time.Second
	leaderEvery  = 50 * time.Millisecond
)

// awaitLeader returns when a leader is known, or after a while without one.
func awaitLeader(ctx context.Context, d *directory.Directory) {
	ctx, cancel := context.WithTimeout(ctx, leaderWithin)
	defer cancel()
	tick := time.NewTicker(leaderEvery)
	defer tick.Stop()
	for {
		if _, led := d.Leader(); led {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// received reads the pieces of a stream.
type received struct {
	stream grpc.ClientStreamingServer[kvtierv1.RestoreSnapshotRequest, kvtierv1.RestoreSnapshotResponse]
	rest   []byte
}

// Read implements io.Reader.
func (r *received) Read(b []byte) (int, error) {
	for len(r.rest) == 0 {
		piece, err := r.stream.Recv()
		if err != nil {
			if errors.Is(err, io.EOF) {
				return 0, io.EOF
			}
			return 0, err
		}
		r.rest = piece.GetData()
	}
	n := copy(b, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}
