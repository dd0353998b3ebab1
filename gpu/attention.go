package gpu

import (
	"fmt"
	"math"
)

// AttentionKernel is the name of the decode attention kernel.
const AttentionKernel = "attention"

// Attention is paged decode attention: for each sequence one query token attends to the keys and values that its block
// table names, in place. Query head h reads KV head h / (QHeads/KVHeads).
//
// A sequence of length zero gives zeros. NaN and infinities take part in the arithmetic like any number: a NaN in a K row
// of the window makes the outputs of its query heads NaN, one in a V row makes that column NaN, nothing else changes.
// The caller owns the struct; Launch has read it, the table and the lengths when it returns.
type Attention struct {
	Layout

	QHeads  int     // a multiple of KVHeads
	Scale   float32 // of the scores; 0 means 1/sqrt(HeadDim), which is not what MLA models want: they pass their own
	Window  int     // attend to the last Window tokens only; 0 means all
	SoftCap float32 // scores become SoftCap*tanh(score/SoftCap) after scaling; 0 means no cap
	// Splits cuts each sequence into that many parts that run in parallel and are combined, for few long sequences.
	// 0 lets the driver choose.
	Splits int

	QType DType // of Q
	Q     Addr  // [batch][QHeads][HeadDim]
	Out   Addr  // [batch][QHeads][ValueDim], FP32; must not overlap anything that is read

	Pool  Addr // address of page 0
	Pages int  // pages in the pool; every table entry in use is below it

	MaxPages int     // columns of Table
	Table    []int32 // [batch][MaxPages] page numbers; entries behind a sequence's last page are not read
	SeqLens  []int32 // [batch] tokens, 0 to MaxPages*Tokens
}

// Bounds of one launch.
const (
	MaxSequences = 65535   // sequences: a grid dimension
	MaxSplits    = 256     // parts of a sequence
	MaxTableSize = 1 << 26 // entries of Table
)

// Name is AttentionKernel.
func (a *Attention) Name() string { return AttentionKernel }

// Batch is the number of sequences.
func (a *Attention) Batch() int { return len(a.SeqLens) }

// Start is the first token that sequence b attends to.
func (a *Attention) Start(b int) int {
	n := int(a.SeqLens[b])
	if a.Window == 0 || a.Window >= n {
		return 0
	}
	return n - a.Window
}

// ScaleOrDefault is Scale, or 1/sqrt(HeadDim) if that is 0.
func (a *Attention) ScaleOrDefault() float32 {
	if a.Scale != 0 {
		return a.Scale
	}
	return float32(1 / math.Sqrt(float64(a.HeadDim)))
}

// QBytes and OutBytes are the sizes of Q and Out.
func (a *Attention) QBytes() int64 {
	return int64(a.Batch()) * int64(a.QHeads) * int64(a.HeadDim) * int64(a.QType.Size())
}

// OutBytes is the size of Out.
func (a *Attention) OutBytes() int64 {
	return int64(a.Batch()) * int64(a.QHeads) * int64(a.ValueDim) * 4
}

// KVBytes is how many bytes of K and V rows the launch reads: what its bandwidth is counted in. A latent row counts once.
func (a *Attention) KVBytes() int64 {
	dims := a.HeadDim + a.ValueDim
	if a.latent() {
		dims = a.HeadDim
	}
	var tokens int64
	for b := range a.SeqLens {
		tokens += int64(a.SeqLens[b]) - int64(a.Start(b))
	}
	return tokens * int64(a.KVHeads) * int64(dims*a.Type.Size())
}

// Validate reports the first bad argument as an *ArgError. It looks at every table entry that the kernel will use.
func (a *Attention) Validate() error {
	if err := a.Layout.Validate(); err != nil {
		return err
	}
	if err := a.validateScalars(); err != nil {
		return err
	}
	return a.validateTable()
}

func (a *Attention) validateScalars() error {
	switch {
	case a.QHeads < a.KVHeads || a.QHeads > maxHeads || a.QHeads%a.KVHeads != 0:
		return attnErr("QHeads", int64(a.QHeads), fmt.Sprintf("a multiple of KVHeads = %d, up to %d", a.KVHeads, maxHeads), ErrShape)
	case a.QType.Size() == 0:
		return attnErr("QType", int64(a.QType), "bf16, fp16 or fp32", ErrShape)
	case a.Window < 0 || a.Window > math.MaxInt32:
		return attnErr("Window", int64(a.Window), "0 to 2^31-1", ErrShape)
	case !(a.SoftCap >= 0) || math.IsInf(float64(a.SoftCap), 0):
		return attnErr("SoftCap", int64(a.SoftCap), "finite and not negative", ErrShape)
	case math.IsNaN(float64(a.Scale)) || math.IsInf(float64(a.Scale), 0):
		return attnErr("Scale", int64(a.Scale), "finite", ErrShape)
	case a.Splits < 0 || a.Splits > MaxSplits:
		return attnErr("Splits", int64(a.Splits), "0 to 256", ErrShape)
	case a.Pages < 0 || a.Pages > math.MaxInt32 || int64(a.Pages) > maxPool/a.PageStride:
		return attnErr("Pages", int64(a.Pages), "0 to 2^31-1, and at most 2^48 bytes", ErrShape)
	case a.Pool%rowAlign != 0:
		return attnErr("Pool", int64(a.Pool), "a multiple of 16", ErrAlign)
	case a.Q%rowAlign != 0:
		return attnErr("Q", int64(a.Q), "a multiple of 16", ErrAlign)
	case a.Out%rowAlign != 0:
		return attnErr("Out", int64(a.Out), "a multiple of 16", ErrAlign)
	}
	return nil
}

func (a *Attention) validateTable() error {
	batch := a.Batch()
	if batch > MaxSequences {
		return attnErr("len(SeqLens)", int64(batch), "at most 65535", ErrShape)
	}
	if a.MaxPages < 0 || a.MaxPages > MaxTableSize || int64(len(a.Table)) != int64(batch)*int64(a.MaxPages) || len(a.Table) > MaxTableSize {
		return attnErr("len(Table)", int64(len(a.Table)), "len(SeqLens) rows of MaxPages, at most 2^26 entries", ErrShape)
	}
	for b, n := range a.SeqLens {
		if n < 0 || int64(n) > int64(a.MaxPages)*int64(a.Tokens) {
			return attnErr(fmt.Sprintf("SeqLens[%d]", b), int64(n), fmt.Sprintf("0 to MaxPages*Tokens = %d", a.MaxPages*a.Tokens), ErrSeqLen)
		}
		first, last := a.pagesInUse(b)
		for i := first; i < last; i++ {
			if p := a.Table[i]; p < 0 || int(p) >= a.Pages {
				return attnErr(fmt.Sprintf("Table[%d]", i), int64(p), fmt.Sprintf("0 to Pages-1 = %d", a.Pages-1), ErrTable)
			}
		}
	}
	return nil
}

// pagesInUse is the range of Table that sequence b's window needs.
func (a *Attention) pagesInUse(b int) (first, last int) {
	row := b * a.MaxPages
	n := int(a.SeqLens[b])
	return row + a.Start(b)/a.Tokens, row + (n+a.Tokens-1)/a.Tokens
}

// Spans lists Q, Out and, for each page in use, its K rows and its V rows.
func (a *Attention) Spans(yield func(Span) bool) {
	if a.Batch() == 0 {
		return
	}
	if !yield(Span{a.Q, a.QBytes(), false}) || !yield(Span{a.Out, a.OutBytes(), true}) {
		return
	}
	k, v := a.rowsBytes(a.HeadDim), a.rowsBytes(a.ValueDim)
	for b := range a.SeqLens {
		first, last := a.pagesInUse(b)
		for i := first; i < last; i++ {
			page := a.Pool + Addr(int64(a.Table[i])*a.PageStride)
			if !yield(Span{page + Addr(a.KOffset), k, false}) {
				return
			}
			if !a.latent() && !yield(Span{page + Addr(a.VOffset), v, false}) {
				return
			}
		}
	}
}

func attnErr(arg string, got int64, want string, class error) error {
	return &ArgError{Op: AttentionKernel, Arg: arg, Got: got, Want: want, Err: class}
}
