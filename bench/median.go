package bench

import (
	"iter"
	"slices"
	"strings"
)

// median of some rates; 0 of none.
func median(rates []float64) float64 {
	if len(rates) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(rates))
	return sorted[len(sorted)/2]
}

func lines(text []byte) iter.Seq[string] { return strings.Lines(string(text)) }
