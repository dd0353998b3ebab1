package gpu

import "fmt"

// Layout says where the K and V rows of a page lie: the row of (token, head) starts KOffset or VOffset bytes into the
// page, plus token*TokenStride + head*HeadStride. Pages of a pool are PageStride bytes apart. VOffset may exceed
// PageStride (all K pages first, all V pages behind them). Every offset and stride is in bytes and a multiple of 16.
//
// Fill it by hand for a foreign tensor, or with NHD, HND, Packed or Latent.
type Layout struct {
	Type    DType
	Tokens  int // per page: 16 to 256, a multiple of 16
	KVHeads int
	HeadDim int // elements of a K row and of a query row
	// ValueDim is the elements of a V row and of an output row. It is HeadDim, except with latent attention (MLA), where
	// the value is the leading part of the same row.
	ValueDim int

	PageStride, KOffset, VOffset, TokenStride, HeadStride int64

	// PageBytes is set where pages begin at multiples of a PageStride that is shorter than a page, as slots of a shared
	// pool do at multiples of 4 KiB: table entries count strides, and two pages in use are at least PageBytes apart.
	// 0: PageStride is the length of a page.
	PageBytes int64
}

// NHD is [page][K|V][token][head][dim], as FlashInfer and FlashAttention read it.
func NHD(t DType, tokens, kvHeads, dim int) Layout {
	row := int64(dim * t.Size())
	plane := row * int64(tokens) * int64(kvHeads)
	return Layout{Type: t, Tokens: tokens, KVHeads: kvHeads, HeadDim: dim, ValueDim: dim,
		PageStride: 2 * plane, VOffset: plane, TokenStride: row * int64(kvHeads), HeadStride: row}
}

// HND is [page][K|V][head][token][dim].
func HND(t DType, tokens, kvHeads, dim int) Layout {
	l := NHD(t, tokens, kvHeads, dim)
	row := int64(dim * t.Size())
	l.TokenStride, l.HeadStride = row, row*int64(tokens)
	return l
}

// Packed is vLLM's [page][head][token][K row | V row].
func Packed(t DType, tokens, kvHeads, dim int) Layout {
	row := int64(dim * t.Size())
	return Layout{Type: t, Tokens: tokens, KVHeads: kvHeads, HeadDim: dim, ValueDim: dim,
		PageStride: 2 * row * int64(tokens) * int64(kvHeads), VOffset: row,
		TokenStride: 2 * row, HeadStride: 2 * row * int64(tokens)}
}

// Latent is MLA's [page][token][latent | rope]: one row per token for all query heads, whose first rank elements are
// the value as well.
func Latent(t DType, tokens, rank, rope int) Layout {
	row := int64((rank + rope) * t.Size())
	return Layout{Type: t, Tokens: tokens, KVHeads: 1, HeadDim: rank + rope, ValueDim: rank,
		PageStride: row * int64(tokens), TokenStride: row, HeadStride: row}
}

// latent reports whether V is the leading part of the K row.
func (l *Layout) latent() bool { return l.ValueDim != l.HeadDim }

// The shape of the latent rows that kernels exist for: that of DeepSeek V2, V3 and Kimi K2.
const (
	LatentRank = 512
	LatentRope = 64
)

// Validate reports the first thing that kernels do not accept, as an *ArgError.
func (l *Layout) Validate() error {
	if err := l.validateShape(); err != nil {
		return err
	}
	for _, a := range []struct {
		name  string
		bytes int64
	}{{"PageStride", l.PageStride}, {"KOffset", l.KOffset}, {"VOffset", l.VOffset}, {"TokenStride", l.TokenStride}, {"HeadStride", l.HeadStride}} {
		if a.bytes < 0 || a.bytes > maxStride {
			return layoutErr(a.name, a.bytes, "0 to 2^40", ErrStride)
		}
		if a.bytes%rowAlign != 0 {
			return layoutErr(a.name, a.bytes, "a multiple of 16", ErrAlign)
		}
	}
	return l.validateStrides()
}

const (
	rowAlign  = 16      // kernels load 16 bytes at a time
	maxStride = 1 << 40 // keeps every sum of products below 2^63
	maxPool   = 1 << 48
	maxHeads  = 1024
)

func (l *Layout) validateShape() error {
	if l.Type.Size() == 0 {
		return layoutErr("Type", int64(l.Type), "bf16, fp16 or fp32", ErrShape)
	}
	if l.Tokens < 16 || l.Tokens > 256 || l.Tokens%16 != 0 {
		return layoutErr("Tokens", int64(l.Tokens), "16 to 256, a multiple of 16", ErrShape)
	}
	if l.KVHeads < 1 || l.KVHeads > maxHeads {
		return layoutErr("KVHeads", int64(l.KVHeads), "1 to 1024", ErrShape)
	}
	if l.latent() {
		if l.HeadDim != LatentRank+LatentRope || l.ValueDim != LatentRank || l.KVHeads != 1 || l.VOffset != l.KOffset {
			return layoutErr("ValueDim", int64(l.ValueDim), "HeadDim, or 512 with HeadDim 576, one head and VOffset = KOffset (MLA)", ErrShape)
		}
		return nil
	}
	switch l.HeadDim {
	case 64, 96, 128, 256:
		return nil
	}
	return layoutErr("HeadDim", int64(l.HeadDim), "64, 96, 128 or 256", ErrShape)
}

// validateStrides makes sure that no two rows of K share a byte, within a page or across pages.
func (l *Layout) validateStrides() error {
	row := int64(l.HeadDim * l.Type.Size())
	inner, outer := l.HeadStride, l.TokenStride
	innerName, outerName, innerCount, outerCount := "HeadStride", "TokenStride", int64(l.KVHeads), int64(l.Tokens)
	if inner > outer || innerCount == 1 {
		inner, outer = outer, inner
		innerName, outerName, innerCount, outerCount = outerName, innerName, outerCount, innerCount
	}
	if innerCount > 1 && inner < row {
		return layoutErr(innerName, inner, fmt.Sprintf("at least a row of %d bytes", row), ErrStride)
	}
	if need := inner*(innerCount-1) + row; outerCount > 1 && outer < need {
		return layoutErr(outerName, outer, fmt.Sprintf("at least %d bytes", need), ErrStride)
	}
	if err := l.validatePage(); err != nil {
		return err
	}
	if d := l.VOffset - l.KOffset; !l.latent() && d > -row && d < row {
		return layoutErr("VOffset", l.VOffset, fmt.Sprintf("at least a row of %d bytes away from KOffset %d", row, l.KOffset), ErrStride)
	}
	return nil
}

// validatePage makes sure that a page holds its rows.
func (l *Layout) validatePage() error {
	name, bytes := "PageStride", l.PageStride
	if l.PageBytes != 0 {
		if l.PageBytes < 0 || l.PageBytes > maxStride {
			return layoutErr("PageBytes", l.PageBytes, "0 to 2^40", ErrStride)
		}
		if l.PageStride < rowAlign {
			return layoutErr(name, l.PageStride, "at least 16 bytes", ErrStride)
		}
		name, bytes = "PageBytes", l.PageBytes
	}
	if need := l.rowsBytes(l.HeadDim); bytes < need {
		return layoutErr(name, bytes, fmt.Sprintf("at least %d bytes", need), ErrStride)
	}
	return nil
}

// rowsBytes is the distance from the first byte of the first row to behind the last byte of the last row of a page.
func (l *Layout) rowsBytes(dim int) int64 {
	return int64(l.Tokens-1)*l.TokenStride + int64(l.KVHeads-1)*l.HeadStride + int64(dim*l.Type.Size())
}

// Row is the byte offset of a K and of a V row from the address of page 0.
func (l *Layout) Row(page int32, token, head int) (k, v int64) {
	at := int64(page)*l.PageStride + int64(token)*l.TokenStride + int64(head)*l.HeadStride
	return at + l.KOffset, at + l.VOffset
}

// PoolBytes is how far a pool of that many pages reaches from the address of page 0.
func (l *Layout) PoolBytes(pages int) int64 {
	return int64(pages-1)*l.PageStride + max(l.KOffset+l.rowsBytes(l.HeadDim), l.VOffset+l.rowsBytes(l.ValueDim))
}

func layoutErr(arg string, got int64, want string, class error) error {
	return &ArgError{Op: "layout", Arg: arg, Got: got, Want: want, Err: class}
}
