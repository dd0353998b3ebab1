package nvme

import (
	"fmt"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
)

// namespace is a registered namespace with its id, which costs a hash.
type namespace struct {
	id paging.NamespaceID
	ns *paging.Namespace
}

// setNamespaces takes over what the index holds, at Open.
func (t *Tier) setNamespaces(found map[uint32]*paging.Namespace, next uint32) {
	for number, ns := range found {
		t.addNamespaceLocked(number, ns.ID(), ns)
	}
	t.nextNumber = next
}

func (t *Tier) addNamespaceLocked(number uint32, id paging.NamespaceID, ns *paging.Namespace) {
	t.namespaces[number] = namespace{id: id, ns: ns}
	if _, ok := t.numbers[id]; !ok {
		t.numbers[id] = number
	}
	for _, part := range ns.Layout.Parts {
		t.raiseSegmentLocked(int64(part.PageBytes))
	}
}

// PutNamespace implements tier.Durable. Two calls at once for one namespace may
// use two numbers for it, which does no harm.
func (t *Tier) PutNamespace(ns *paging.Namespace) error {
	id := ns.ID()
	t.mu.Lock()
	if t.state != tier.Loading {
		if err := t.stateErrorLocked(); err != nil {
			t.mu.Unlock()
			return err
		}
	}
	if _, ok := t.numbers[id]; ok {
		t.mu.Unlock()
		return nil
	}
	number, m, stop := t.nextNumber, t.manifest, t.bypassed
	t.nextNumber++
	t.mu.Unlock()

	encoded := paging.EncodeNamespace(ns)
	kept, err := paging.DecodeNamespace(encoded)
	if err != nil {
		return fmt.Errorf("put namespace %s: %w", id.Short(), err)
	}
	if err := m.putNamespace(stop, number, encoded); err != nil {
		return fmt.Errorf("put namespace %s: %w: %w", id.Short(), err, paging.ErrUnavailable)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.addNamespaceLocked(number, id, kept)
	return nil
}

// DropNamespace implements tier.Durable. Records that still name it are dropped
// by the next Recover.
func (t *Tier) DropNamespace(id paging.NamespaceID) error {
	t.mu.Lock()
	var numbers []uint32
	for number, n := range t.namespaces {
		if n.id == id {
			numbers = append(numbers, number)
		}
	}
	if len(numbers) == 0 {
		t.mu.Unlock()
		return nil
	}
	if err := t.stateErrorLocked(); err != nil {
		t.mu.Unlock()
		return err
	}
	delete(t.numbers, id)
	for _, number := range numbers {
		delete(t.namespaces, number)
	}
	m, stop := t.manifest, t.bypassed
	t.mu.Unlock()
	for _, number := range numbers {
		if err := m.dropNamespace(stop, number); err != nil {
			return fmt.Errorf("drop namespace %s: %w: %w", id.Short(), err, paging.ErrUnavailable)
		}
	}
	return nil
}

// Namespaces implements tier.Durable.
func (t *Tier) Namespaces() []*paging.Namespace {
	t.mu.Lock()
	defer t.mu.Unlock()
	list := make([]*paging.Namespace, 0, len(t.numbers))
	for _, number := range t.numbers {
		list = append(list, t.namespaces[number].ns)
	}
	return list
}
