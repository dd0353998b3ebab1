package policy

const window uint8 = 2 // queue number beside slru's two

// wtinylfu admits to a segmented LRU only what was used more often than the
// block it would replace. Newcomers pass a small LRU window; the oldest block of
// a full window is the candidate, and the contest is held in next.
type wtinylfu struct {
	ns           *Blocks
	window       list
	windowWeight int64 // hidden members included
	windowCap    int64
	main         *slru
	mainWeight   int64
	mainCap      int64
	counts       map[uint64]uint32 // halved and thinned every 10 capacities of offers
	offered      int64
	capacity     int64
}

func newWTinyLFU(ns *Blocks, capacity int64) *wtinylfu {
	o := &wtinylfu{ns: ns, window: newList(), main: newSLRU(ns, 0), counts: make(map[uint64]uint32)}
	o.resize(capacity)
	return o
}

// count counts an offer. Ageing treats every key alike, so the order of the map
// does not matter.
func (o *wtinylfu) count(n *node) {
	o.counts[n.key]++
	o.offered += n.weight
	if o.offered < 10*o.capacity {
		return
	}
	o.offered = 0
	for k, c := range o.counts {
		if c > 1 {
			o.counts[k] = c / 2
		} else {
			delete(o.counts, k)
		}
	}
}

func (o *wtinylfu) insert(id ID, _ Access) {
	n := o.ns.at(id)
	o.count(n)
	n.queue = window
	o.windowWeight += n.weight
	o.ns.pushNewest(&o.window, id)
	o.spill()
}

// spill moves the oldest of an overfull window to main while main has room.
func (o *wtinylfu) spill() {
	for o.windowWeight > o.windowCap && !o.window.empty() {
		id := o.window.oldest
		n := o.ns.at(id)
		if o.mainWeight+n.weight > o.mainCap {
			return
		}
		o.ns.unlink(&o.window, id)
		o.windowWeight -= n.weight
		o.mainWeight += n.weight
		o.main.insert(id, Access{})
	}
}

func (o *wtinylfu) hit(id ID, a Access) {
	n := o.ns.at(id)
	o.count(n)
	if n.queue != window {
		o.main.hit(id, a)
		return
	}
	o.ns.unlink(&o.window, id)
	o.ns.pushNewest(&o.window, id)
}

func (o *wtinylfu) leave(id ID, evicted bool) {
	n := o.ns.at(id)
	if n.queue == window {
		o.windowWeight -= n.weight
		o.ns.unlink(&o.window, id)
		return
	}
	o.mainWeight -= n.weight
	o.main.leave(id, evicted)
	o.spill()
}

func (o *wtinylfu) next() (ID, bool) {
	victim, ok := o.main.next()
	if o.window.empty() {
		return victim, ok
	}
	candidate := o.window.oldest
	if !ok {
		return candidate, true
	}
	if o.windowWeight > o.windowCap && o.counts[o.ns.at(candidate).key] <= o.counts[o.ns.at(victim).key] {
		return candidate, true
	}
	return victim, true
}

func (o *wtinylfu) hide(id ID) {
	if o.ns.at(id).queue == window {
		o.ns.unlink(&o.window, id)
		return
	}
	o.main.hide(id)
}

func (o *wtinylfu) show(id ID, newest bool) {
	if o.ns.at(id).queue == window {
		o.ns.push(&o.window, id, newest)
		return
	}
	o.main.show(id, newest)
}

func (o *wtinylfu) resize(capacity int64) {
	o.capacity = capacity
	o.windowCap = max(1, int64(.01*float64(capacity)))
	o.mainCap = max(1, capacity-o.windowCap)
	o.main.resize(o.mainCap)
	o.spill()
}
