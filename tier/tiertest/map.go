package tiertest

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
)

// Map is a tier.Durable in a Go map: the model that the suite compares with,
// and a fast stand-in for a disk. It counts pages in whole units against a
// budget. Its pages survive in what Reopen returns.
type Map struct {
	kind   tier.Kind
	budget int64

	mu         sync.Mutex
	state      tier.State
	next       tier.Ref
	pages      map[tier.Ref]*mapPage
	used       int64
	pageBytes  int64
	namespaces map[paging.NamespaceID]*paging.Namespace
}

type mapPage struct {
	page  tier.Page
	owner uint32
	bytes []byte
}

var _ tier.Durable = (*Map)(nil)

// NewMap returns an empty Map of this kind and budget, in the state Loading.
func NewMap(kind tier.Kind, budgetBytes int64) *Map {
	return &Map{
		kind: kind, budget: budgetBytes, next: 1,
		pages: map[tier.Ref]*mapPage{}, namespaces: map[paging.NamespaceID]*paging.Namespace{},
	}
}

// Reopen returns a Map with the same pages and namespaces, as after a restart.
// m must be closed.
func (m *Map) Reopen() *Map {
	m.mu.Lock()
	defer m.mu.Unlock()
	return &Map{
		kind: m.kind, budget: m.budget, next: m.next, pages: m.pages, namespaces: m.namespaces,
		used: m.used, pageBytes: m.pageBytes,
	}
}

// Kind implements tier.Tier.
func (m *Map) Kind() tier.Kind { return m.kind }

func (m *Map) readyLocked() error {
	switch m.state {
	case tier.Ready:
		return nil
	case tier.Closed:
		return paging.ErrClosed
	}
	return fmt.Errorf("%v: %w", m.state, paging.ErrUnavailable)
}

func slotBytes(bytes uint32) int64 {
	return (int64(bytes) + paging.UnitBytes - 1) &^ (paging.UnitBytes - 1)
}

// Store implements tier.Tier.
func (m *Map) Store(ctx context.Context, pages []tier.Page, src [][]byte, owners []uint32, refs []tier.Ref) error {
	if len(src) != len(pages) || len(owners) != len(pages) || len(refs) != len(pages) {
		return fmt.Errorf("slices of different lengths: %w", paging.ErrInvalid)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.readyLocked(); err != nil {
		return err
	}
	for i, p := range pages {
		refs[i] = 0
		if len(src[i]) != int(p.Bytes) || p.Bytes == 0 {
			return fmt.Errorf("page of %d bytes from %d: %w", p.Bytes, len(src[i]), paging.ErrInvalid)
		}
		if m.namespaces[p.ID.Namespace] == nil {
			return paging.ErrUnknownNamespace
		}
	}
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %w", context.Cause(ctx), paging.ErrExpired)
	}
	var err error
	for i, p := range pages {
		if m.used+slotBytes(p.Bytes) > m.budget {
			err = paging.ErrNoSpace
			continue
		}
		refs[i] = m.next
		m.pages[m.next] = &mapPage{page: p, owner: owners[i], bytes: slices.Clone(src[i])}
		m.next++
		m.used += slotBytes(p.Bytes)
		m.pageBytes += int64(p.Bytes)
	}
	return err
}

// Load implements tier.Tier.
func (m *Map) Load(ctx context.Context, p tier.Page, r tier.Ref, dst []byte) error {
	if len(dst) != int(p.Bytes) {
		return fmt.Errorf("page of %d bytes into %d: %w", p.Bytes, len(dst), paging.ErrInvalid)
	}
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %w", context.Cause(ctx), paging.ErrExpired)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.readyLocked(); err != nil {
		return err
	}
	stored, ok := m.pages[r]
	if !ok {
		return paging.ErrNotFound
	}
	if stored.page.Bytes != p.Bytes {
		return fmt.Errorf("page of %d bytes where %d are asked: %w", stored.page.Bytes, p.Bytes, paging.ErrInvalid)
	}
	copy(dst, stored.bytes)
	if sum := paging.Checksum(dst); sum != p.Sum {
		if sum == stored.page.Sum {
			return paging.ErrIdentity
		}
		return paging.ErrCorrupt
	}
	return nil
}

// Free implements tier.Tier.
func (m *Map) Free(refs ...tier.Ref) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.state == tier.Closed {
		return
	}
	for _, r := range refs {
		m.freeLocked(r)
	}
}

func (m *Map) freeLocked(r tier.Ref) {
	if p, ok := m.pages[r]; ok {
		m.used -= slotBytes(p.page.Bytes)
		m.pageBytes -= int64(p.page.Bytes)
		delete(m.pages, r)
	}
}

// Corrupt flips one bit of the page at r.
func (m *Map) Corrupt(r tier.Ref) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if p, ok := m.pages[r]; ok {
		p.bytes[len(p.bytes)/2] ^= 1
	}
}

// Usage implements tier.Tier.
func (m *Map) Usage() tier.Usage {
	m.mu.Lock()
	defer m.mu.Unlock()
	return tier.Usage{
		State: m.state, BudgetBytes: m.budget, HeldBytes: m.used, UsedBytes: m.used,
		PageBytes: m.pageBytes, Pages: int64(len(m.pages)),
	}
}

// Close implements tier.Tier.
func (m *Map) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.state = tier.Closed
	return nil
}

// Recover implements tier.Durable, in the order of storing.
func (m *Map) Recover(ctx context.Context, keep func(tier.Record) (uint32, bool), progress func(done, about int64)) error {
	m.mu.Lock()
	if m.state != tier.Loading {
		m.mu.Unlock()
		return fmt.Errorf("recover a second time: %w", paging.ErrInvalid)
	}
	refs := make([]tier.Ref, 0, len(m.pages))
	for r := range m.pages {
		refs = append(refs, r)
	}
	m.mu.Unlock()
	slices.Sort(refs)
	for _, r := range refs {
		if err := ctx.Err(); err != nil {
			return err
		}
		m.mu.Lock()
		rec := tier.Record{Page: m.pages[r].page, Ref: r}
		m.mu.Unlock()
		owner, ok := keep(rec)
		m.mu.Lock()
		if ok {
			m.pages[r].owner = owner
		} else {
			m.freeLocked(r)
		}
		m.mu.Unlock()
	}
	if progress != nil {
		progress(int64(len(refs)), int64(len(refs)))
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.state == tier.Loading {
		m.state = tier.Ready
	}
	return nil
}

// PutNamespace implements tier.Durable.
func (m *Map) PutNamespace(ns *paging.Namespace) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.state == tier.Closed {
		return paging.ErrClosed
	}
	m.namespaces[ns.ID()] = ns
	return nil
}

// DropNamespace implements tier.Durable.
func (m *Map) DropNamespace(id paging.NamespaceID) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.namespaces, id)
	return nil
}

// Namespaces implements tier.Durable.
func (m *Map) Namespaces() []*paging.Namespace {
	m.mu.Lock()
	defer m.mu.Unlock()
	list := make([]*paging.Namespace, 0, len(m.namespaces))
	for _, ns := range m.namespaces {
		list = append(list, ns)
	}
	return list
}

// Reclaim implements tier.Durable: the pages in the order of storing.
func (m *Map) Reclaim(bytes uint32, movable func(owner uint32) bool) ([]uint32, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	need := m.used + slotBytes(bytes) - m.budget
	refs := make([]tier.Ref, 0, len(m.pages))
	for r := range m.pages {
		refs = append(refs, r)
	}
	slices.Sort(refs)
	owners := map[uint32]bool{}
	var list []uint32
	for _, r := range refs {
		if need <= 0 {
			break
		}
		p := m.pages[r]
		if !movable(p.owner) {
			continue
		}
		need -= slotBytes(p.page.Bytes)
		if !owners[p.owner] {
			owners[p.owner] = true
			list = append(list, p.owner)
		}
	}
	return list, need <= 0
}
