package policy

// Evidence is counted in requests, not in blocks: a conversation that goes on
// brings back all its blocks at once, and is one event.
const (
	// minReturns requests must have come back before anything is made of it.
	minReturns = 100
	// poolPrior requests speak for the view that nothing is ever used again.
	poolPrior = 100
	// classPrior requests speak for the view that a class is like its model: all
	// blocks used once, for those; for later turns, the class one turn less.
	classPrior = 3
)

// learned is what a sampler has counted of one class.
type learned struct {
	hits     [ages]float64 // next use came at this age
	survived [ages]float64 // next use did not come at this age
	blocks   float64       // samples
	requests float64       // the part of a request that each was
}

func (l *learned) add(m *learned) {
	for a := range ages {
		l.hits[a] += m.hits[a]
		l.survived[a] += m.survived[a]
	}
	l.blocks += m.blocks
	l.requests += m.requests
}

func (l *learned) halve() {
	for a := range ages {
		l.hits[a] /= 2
		l.survived[a] /= 2
	}
	l.blocks /= 2
	l.requests /= 2
}

// perRequest is how many samples one request of the class makes, of 1<<shift
// blocks one being sampled.
func (l *learned) perRequest(shift uint) float64 {
	if l.requests == 0 {
		return 1
	}
	return max(1, l.blocks/(l.requests*float64(uint64(1)<<shift)))
}

// toward replaces model by the hazard of the class, the probability of a use at
// each age given that there was none before, where the model counts as much as
// prior requests.
func (l *learned) toward(model *[ages]float64, prior float64, shift uint) {
	weight := prior * l.perRequest(shift)
	for a := range ages {
		model[a] = (l.hits[a] + float64(weight*model[a])) / (l.hits[a] + l.survived[a] + weight)
	}
}

// density is what a block is expected to bring for its room, in hits per tick.
type density [classes][ages]float64

// compute derives the densities of all classes from what was learned.
//
// Staying until age a brings P(a) hits, the probability of a use by then, and
// costs T(a) ticks, the expected time until that use or a. As a grows, the
// points (T, P) trace a curve; the best that a block can do from where it stands
// is the steepest line from its point to a later one. That slope may rise with
// age, since few conversations go on within seconds. Taking the least concave
// curve above instead makes the density fall with age, so within a class the
// block used longest ago is always the one to compare; it costs little, as a
// block is worth from the start what it will be worth at its best.
//
// The head of a chain is worth nothing less than what follows it: without it,
// the rest is no prefix. So a class has at least the density of those with
// fewer uses, and a last block at most that of the blocks before it.
func (d *density) compute(of *[classes]learned, shift uint) {
	var all learned
	for c := range turnClass {
		all.add(&of[c])
	}
	var once, turn [ages]float64
	all.toward(&once, poolPrior, shift)
	turn = once
	var best [ages]float64
	for c := range classes {
		model := &turn
		if c < turnClass {
			one := once
			model = &one
		}
		of[c].toward(model, classPrior, shift)
		envelope(model, &d[c])
		for a := range ages {
			switch {
			case c >= turnClass:
				best[a] = max(best[a], d[c][a])
				d[c][a] = best[a]
			case c%2 == lastOfRequest:
				d[c][a] = min(d[c][a], d[c-1][a])
			default:
				best[a] = max(best[a], d[c][a])
			}
		}
	}
}

// point of a curve: staying for ticks is expected to bring hits.
type point struct{ ticks, hits float64 }

func slope(p, q point) float64 {
	if q.ticks <= p.ticks {
		return 0
	}
	return (q.hits - p.hits) / (q.ticks - p.ticks)
}

// envelope sets the slope, at each age, of the least concave curve above the one
// of a hazard; 0 at the last. The conversions keep compilers from fusing, so that
// all machines compute the same.
func envelope(hazard, slopes *[ages]float64) {
	var curve [ages]point
	alive := 1.0
	for a := range ages - 1 {
		ticks := float64(ageStart(a+1) - ageStart(a))
		curve[a+1].hits = curve[a].hits + float64(alive*hazard[a])
		curve[a+1].ticks = curve[a].ticks + float64(float64(alive*ticks)*(1-float64(hazard[a]/2)))
		alive *= 1 - hazard[a]
	}
	var hull [ages]int
	n := 0
	for a := range curve {
		for n > 1 && slope(curve[hull[n-2]], curve[hull[n-1]]) <= slope(curve[hull[n-1]], curve[a]) {
			n--
		}
		hull[n] = a
		n++
	}
	for i := range n - 1 {
		d := slope(curve[hull[i]], curve[hull[i+1]])
		for a := hull[i]; a < hull[i+1]; a++ {
			slopes[a] = d
		}
	}
	slopes[ages-1] = 0
}
