package migrate

import "time"

// Rates are what is known of how fast a session can be had at its target.
type Rates struct {
	// PrefillTokensPerSecond is what the engine stated when it registered the namespace. 0:
	// not known.
	PrefillTokensPerSecond float64
	// BytesPerSecond was measured between the two nodes, or is the limit if that is less.
	// 0: not known.
	BytesPerSecond float64
}

// Advice says whether a session is had sooner by copying it or by computing it again.
// Times are 0 where they are not known.
type Advice struct {
	Copy      time.Duration
	Recompute time.Duration
	// Cheaper reports that computing it again is sooner. It is a word of advice only: it
	// counts no price for the processor that would do it.
	Cheaper bool
}

// Advise compares. bytes are those that the target lacks, tokens those of the blocks
// that they are of: what it has already is neither copied nor computed.
func Advise(bytes, tokens int64, r Rates) (a Advice) {
	a.Copy = timeFor(bytes, r.BytesPerSecond)
	a.Recompute = timeFor(tokens, r.PrefillTokensPerSecond)
	a.Cheaper = bytes > 0 && r.BytesPerSecond > 0 && r.PrefillTokensPerSecond > 0 && a.Recompute < a.Copy
	return a
}

// timeFor is how long an amount takes, at most a year: a rate may be next to nothing.
func timeFor(amount int64, perSecond float64) time.Duration {
	if perSecond <= 0 || amount <= 0 {
		return 0
	}
	const most = float64(365 * 24 * time.Hour)
	return time.Duration(min(float64(amount)/perSecond*float64(time.Second), most))
}
