package gpu

import "math"

// Reference computes the attention that a describes, in float64 and as plainly as it can be written: what every kernel
// is measured against. q holds Q, pool starts at the address of page 0; both are borrowed. a must be valid.
// The result is [batch][QHeads][ValueDim].
func (a *Attention) Reference(q, pool []byte) []float64 {
	out := make([]float64, a.Batch()*a.QHeads*a.ValueDim)
	group := a.QHeads / a.KVHeads
	query := make([]float64, a.HeadDim)
	for b := range a.SeqLens {
		for h := range a.QHeads {
			row := b*a.QHeads + h
			for d := range query {
				query[d] = float64(a.QType.Load(q[(row*a.HeadDim+d)*a.QType.Size():]))
			}
			a.referenceHead(out[row*a.ValueDim:][:a.ValueDim], query, pool, b, h/group)
		}
	}
	return out
}

func (a *Attention) referenceHead(out, query []float64, pool []byte, b, head int) {
	start, n, size := a.Start(b), int(a.SeqLens[b]), int64(a.Type.Size())
	if n == 0 {
		return
	}
	scores := make([]float64, n-start)
	top := math.Inf(-1)
	for i := range scores {
		k, _ := a.Row(a.Table[b*a.MaxPages+(start+i)/a.Tokens], (start+i)%a.Tokens, head)
		var s float64
		for d, x := range query {
			s += x * float64(a.Type.Load(pool[k+int64(d)*size:]))
		}
		s *= float64(a.ScaleOrDefault())
		if c := float64(a.SoftCap); c != 0 {
			s = c * math.Tanh(s/c)
		}
		scores[i] = s
		top = math.Max(top, s)
	}
	var sum float64
	for i := range scores {
		p := math.Exp(scores[i] - top)
		sum += p
		_, v := a.Row(a.Table[b*a.MaxPages+(start+i)/a.Tokens], (start+i)%a.Tokens, head)
		for d := range out {
			out[d] += p * float64(a.Type.Load(pool[v+int64(d)*size:]))
		}
	}
	for d := range out {
		out[d] /= sum
	}
}

// RelativeError is the L2 distance of got, FP32 elements, from want over the L2 length of want: the figure that the
// tolerances of attention are stated in. It is NaN if got holds a NaN where want does not, and positions where both are
// not finite count as equal.
func RelativeError(got []byte, want []float64) float64 {
	var diff, norm float64
	for i, w := range want {
		g := float64(FP32.Load(got[4*i:]))
		if (math.IsNaN(w) || math.IsInf(w, 0)) && (math.IsNaN(g) || math.IsInf(g, 0)) {
			continue
		}
		diff += (g - w) * (g - w)
		norm += w * w
	}
	if norm == 0 {
		return math.Sqrt(diff)
	}
	return math.Sqrt(diff / norm)
}
