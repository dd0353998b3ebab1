package rpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/proto/kvstatus"
	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// maxSlowFetches bounds the fetches of one stream that wait for I/O. Beyond it a
// fetch is refused with ErrUnavailable and a time to retry after: an engine
// schedules fewer requests at once than that.
const maxSlowFetches = 64

// helloWithin bounds the wait for the first message of an attachment stream.
const helloWithin = 10 * time.Second

type attachServer = grpc.BidiStreamingServer[kvtierv1.AttachRequest, kvtierv1.AttachResponse]

// Attach holds an attachment.
func (p *pagesService) Attach(stream attachServer) error {
	caller, err := p.accounts.engine(stream.Context())
	if err != nil {
		return err
	}
	if !caller.Local {
		return fmt.Errorf("attach is served on the unix socket only: use ReadPages and WritePages here: %w", paging.ErrIncompatible)
	}
	s := &attachStream{stream: stream, node: p.node, tenant: caller.Tenant, calls: p.calls, slow: make(chan struct{}, maxSlowFetches)}
	s.reader.request = new(kvtierv1.AttachRequest)
	first := make(chan error, 1)
	next := make(chan struct{})
	p.streams.Go(func() { s.read(first, next) }) // owner: this call; exits when the handler has returned; bound: one a stream
	timer := time.NewTimer(helloWithin)
	defer timer.Stop()
	select {
	case err := <-first:
		if err != nil {
			return streamEnd(err)
		}
	case <-timer.C:
		return fmt.Errorf("no hello within %v: %w", helloWithin, paging.ErrExpired)
	}
	h, err := hello(s.reader.request.GetHello())
	if err != nil {
		return err
	}
	att, welcome, err := p.node.Attach(stream.Context(), caller, h)
	if err != nil {
		return err
	}
	defer att.Detach()
	s.att = att
	answer := &kvtierv1.AttachResponse{
		RequestId: s.reader.request.GetRequestId(),
		Message:   &kvtierv1.AttachResponse_Welcome{Welcome: encodeWelcome(&welcome)},
	}
	if err := s.send(answer); err != nil {
		return err
	}
	close(next)
	return s.events(first)
}

// streamEnd turns the end of the receiving side into the end of the call: a
// half-closed stream is an orderly end.
func streamEnd(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// attachStream is one attachment stream.
type attachStream struct {
	stream attachServer
	node   Node
	tenant string
	att    Attachment
	calls  *calls
	slow   chan struct{} // one token per fetch that waits for I/O

	// sendMu serialises SendMsg, which is what gRPC asks for. It is held while a
	// send waits for the client to read: then nothing else can be said either.
	sendMu sync.Mutex

	workers sync.WaitGroup
	reader  readerState
}

// readerState belongs to the goroutine that reads the stream. Its messages are
// used again: a message is encoded by the time that Send returns.
type readerState struct {
	scratch scratch
	request *kvtierv1.AttachRequest
	fetch   FetchRequest
	result  FetchResult
	lost    []uint64

	fetchAnswer   fetchAnswer
	releaseAnswer struct {
		response kvtierv1.AttachResponse
		message  kvtierv1.AttachResponse_Release
		release  kvtierv1.ReleaseResponse
	}
	renewAnswer struct {
		response kvtierv1.AttachResponse
		message  kvtierv1.AttachResponse_Renew
		renew    kvtierv1.RenewResponse
	}
}

type fetchAnswer struct {
	response kvtierv1.AttachResponse
	message  kvtierv1.AttachResponse_Fetch
	fetch    kvtierv1.FetchResponse
}

func (a *fetchAnswer) fill(request uint64, res *FetchResult) *kvtierv1.AttachResponse {
	encodeFetch(res, &a.fetch)
	a.message.Fetch = &a.fetch
	a.response.RequestId = request
	a.response.Message = &a.message
	return &a.response
}

func (s *attachStream) send(m *kvtierv1.AttachResponse) error {
	s.sendMu.Lock()
	defer s.sendMu.Unlock()
	return s.stream.SendMsg(m)
}

// read receives messages until the stream ends. The first goes to the handler,
// which closes next once the attachment exists; first also carries the end.
func (s *attachStream) read(first chan<- error, next <-chan struct{}) {
	defer s.workers.Wait()
	err := s.stream.RecvMsg(s.reader.request)
	first <- err
	if err != nil {
		return
	}
	select {
	case <-next:
	case <-s.stream.Context().Done():
		return
	}
	for {
		if err := s.stream.RecvMsg(s.reader.request); err != nil {
			first <- err
			return
		}
		if err := s.serve(s.reader.request); err != nil {
			first <- err
			return
		}
	}
}

// events sends what the node has to say until the stream ends.
func (s *attachStream) events(readEnd <-chan error) error {
	for {
		select {
		case err := <-readEnd:
			return streamEnd(err)
		case <-s.att.Ended():
			if err := s.sendEvents(); err != nil { // that the node stops, for one
				return err
			}
			return s.att.Err()
		case <-s.stream.Context().Done():
			return s.stream.Context().Err()
		case <-s.att.Events():
			if err := s.sendEvents(); err != nil {
				return err
			}
		}
	}
}

// sendEvents sends all that the node has to say.
func (s *attachStream) sendEvents() error {
	for {
		var ev Event
		if !s.att.Next(&ev) {
			return nil
		}
		if err := s.sendEvent(&ev); err != nil {
			return err
		}
	}
}

func (s *attachStream) sendEvent(ev *Event) error {
	if len(ev.Extents) > 0 {
		if err := s.send(&kvtierv1.AttachResponse{Message: &kvtierv1.AttachResponse_ExtentsAdded{ExtentsAdded: encodeExtents(ev.Extents)}}); err != nil {
			return err
		}
	}
	if len(ev.Revoked) > 0 {
		revocation := &kvtierv1.Revocation{LeaseIds: ev.Revoked, Reason: kvtierv1.RevocationReason_REVOCATION_REASON_OVERDUE}
		if err := s.send(&kvtierv1.AttachResponse{Message: &kvtierv1.AttachResponse_Revocation{Revocation: revocation}}); err != nil {
			return err
		}
	}
	for i := range ev.Progress {
		if err := s.send(&kvtierv1.AttachResponse{Message: &kvtierv1.AttachResponse_Prefetch{Prefetch: encodeProgress(&ev.Progress[i])}}); err != nil {
			return err
		}
	}
	for _, e := range ev.Sessions {
		if err := s.send(&kvtierv1.AttachResponse{Message: &kvtierv1.AttachResponse_Session{Session: e}}); err != nil {
			return err
		}
	}
	if ev.Stopping > 0 {
		return s.send(&kvtierv1.AttachResponse{Message: &kvtierv1.AttachResponse_Stopping{
			Stopping: &kvtierv1.Stopping{Within: durationpb.New(ev.Stopping)},
		}})
	}
	return nil
}

// serve answers one message. An error ends the stream.
func (s *attachStream) serve(m *kvtierv1.AttachRequest) error {
	switch msg := m.GetMessage().(type) {
	case *kvtierv1.AttachRequest_Fetch:
		return s.serveFetch(m.GetRequestId(), msg.Fetch)
	case *kvtierv1.AttachRequest_Adopt:
		return s.serveAdopt(m.GetRequestId(), msg.Adopt)
	case *kvtierv1.AttachRequest_Release:
		return s.serveRelease(m.GetRequestId(), msg.Release)
	case *kvtierv1.AttachRequest_Renew:
		return s.serveRenew(m.GetRequestId(), msg.Renew)
	case *kvtierv1.AttachRequest_Revoked:
		s.att.Revoked(msg.Revoked.GetLeaseIds())
		return nil
	case *kvtierv1.AttachRequest_Abort:
		return s.serveAbort(m.GetRequestId(), msg.Abort)
	case *kvtierv1.AttachRequest_Hello:
		return invalid("a second hello on one attachment stream")
	}
	return invalid("an attach message without content")
}

func (s *attachStream) fail(request uint64, err error) error {
	if request == 0 {
		return nil
	}
	return s.send(&kvtierv1.AttachResponse{
		RequestId: request, Message: &kvtierv1.AttachResponse_Error{Error: kvstatus.Detail(err)},
	})
}

func (s *attachStream) serveFetch(request uint64, m *kvtierv1.FetchRequest) error {
	timed := s.calls.begin(callStreamFetch)
	r := &s.reader
	if request == 0 {
		timed.end(paging.ErrInvalid)
		return invalid("a fetch without request_id: nobody would release its lease")
	}
	if m.GetSessionRange() == nil { // else its names have to be found, which may take a while
		if err := r.scratch.fetch(m, &r.fetch); err != nil {
			timed.end(err)
			return s.fail(request, err)
		}
		r.result.Reset()
		done, err := s.att.FetchResident(&r.fetch, &r.result)
		switch {
		case err != nil:
			timed.end(err)
			return s.fail(request, err)
		case done:
			err := s.send(r.fetchAnswer.fill(request, &r.result))
			timed.end(err)
			return err
		}
	}
	select {
	case s.slow <- struct{}{}:
	default:
		err := kvstatus.WithRetry(fmt.Errorf("%d fetches of this attachment wait for i/o: %w", maxSlowFetches, paging.ErrUnavailable), 10*time.Millisecond)
		timed.end(err)
		return s.fail(request, err)
	}
	r.request = new(kvtierv1.AttachRequest) // m belongs to the worker now
	s.workers.Go(func() {                   // owner: this stream; exits with the fetch; bound: maxSlowFetches
		defer func() { <-s.slow }()
		timed.end(s.fetchSlow(request, m))
	})
	return nil
}

// fill replaces a session range by the names of its blocks.
func (s *attachStream) fill(m *kvtierv1.FetchRequest) error {
	ctx, cancel := context.WithTimeout(s.stream.Context(), rangeWithin)
	defer cancel()
	return fill(ctx, s.node, s.tenant, m.GetSessionRange(), chainFields{&m.NamespaceId, &m.BlockNames, &m.FirstBlock})
}

// rangeWithin bounds the wait for the names of a session.
const rangeWithin = 5 * time.Second

// fetchSlow answers a fetch that waits for I/O.
func (s *attachStream) fetchSlow(request uint64, m *kvtierv1.FetchRequest) error {
	var scratch scratch
	var r FetchRequest
	var res FetchResult
	if err := s.fill(m); err != nil {
		return s.fail(request, err)
	}
	if err := scratch.fetch(m, &r); err != nil {
		return s.fail(request, err)
	}
	ctx, cancel := context.WithTimeout(s.stream.Context(), r.Timeout)
	defer cancel()
	if err := s.att.Fetch(ctx, &r, &res); err != nil {
		if sendErr := s.fail(request, err); sendErr != nil {
			return sendErr
		}
		return err
	}
	return s.send(new(fetchAnswer).fill(request, &res))
}

func (s *attachStream) serveAdopt(request uint64, m *kvtierv1.AdoptRequest) error {
	timed := s.calls.begin(callStreamAdopt)
	if request == 0 {
		timed.end(paging.ErrInvalid)
		return invalid("an adopt without request_id: nobody would release its lease")
	}
	token, err := id("adopt_token", m.GetAdoptToken())
	if err == nil {
		s.reader.result.Reset()
		err = s.att.Adopt(token, paging.PartSet(m.GetParts()), &s.reader.result)
	}
	if err != nil {
		timed.end(err)
		return s.fail(request, err)
	}
	out := &kvtierv1.AdoptResponse{}
	encodeAdopt(&s.reader.result, out)
	err = s.send(&kvtierv1.AttachResponse{RequestId: request, Message: &kvtierv1.AttachResponse_Adopt{Adopt: out}})
	timed.end(err)
	return err
}

func (s *attachStream) serveRelease(request uint64, m *kvtierv1.ReleaseRequest) error {
	timed := s.calls.begin(callStreamRelease)
	tokens, err := s.reader.scratch.released(m)
	if err != nil {
		timed.end(err)
		return s.fail(request, err)
	}
	s.reader.lost = s.att.Release(m.GetLeaseIds(), tokens, s.reader.lost[:0])
	if request == 0 {
		timed.end(nil)
		return nil
	}
	a := &s.reader.releaseAnswer
	a.release.Lost = s.reader.lost
	a.message.Release = &a.release
	a.response.RequestId = request
	a.response.Message = &a.message
	err = s.send(&a.response)
	timed.end(err)
	return err
}

func (s *attachStream) serveAbort(request uint64, m *kvtierv1.AbortRequest) error {
	attempt, err := id("attempt", m.GetAttempt())
	if err == nil {
		err = s.att.Abort(attempt)
	}
	switch {
	case err != nil:
		return s.fail(request, err)
	case request == 0:
		return nil
	}
	return s.send(&kvtierv1.AttachResponse{
		RequestId: request, Message: &kvtierv1.AttachResponse_Abort{Abort: &kvtierv1.AbortResponse{}},
	})
}

func (s *attachStream) serveRenew(request uint64, m *kvtierv1.RenewRequest) error {
	timed := s.calls.begin(callStreamRenew)
	ttl, err := duration("lease_ttl", m.GetLeaseTtl(), 0, maxLeaseTTL)
	if err != nil {
		timed.end(err)
		return s.fail(request, err)
	}
	s.reader.lost = s.att.Renew(m.GetLeaseIds(), ttl, s.reader.lost[:0])
	if request == 0 {
		timed.end(nil)
		return nil
	}
	a := &s.reader.renewAnswer
	a.renew.Unknown = s.reader.lost
	a.message.Renew = &a.renew
	a.response.RequestId = request
	a.response.Message = &a.message
	err = s.send(&a.response)
	timed.end(err)
	return err
}
