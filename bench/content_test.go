package bench

import (
	"math/rand/v2"
	"testing"

	"github.com/kvtier/kvtier/paging"
)

func testPage(block, part int) paging.PageID {
	var id paging.PageID
	id.Namespace[0] = 7
	id.Name = TraceBlock(uint64(block))
	id.Part = part
	return id
}

func TestContentRoundTrip(t *testing.T) {
	c := Content{Seed: 3}
	for _, n := range []int{0, 1, 7, 8, 31, 32, 33, 4096, 65537} {
		page := make([]byte, n)
		c.Fill(page, testPage(1, 0))
		if at := c.Check(page, testPage(1, 0)); at != -1 {
			t.Errorf("page of %d bytes: right bytes refused at %d", n, at)
		}
	}
}

func TestContentFindsEveryMixUp(t *testing.T) {
	c := Content{Seed: 3}
	page := make([]byte, 4096)
	id := testPage(1, 0)
	c.Fill(page, id)
	other := id
	other.Namespace[31]++
	for name, wrong := range map[string]paging.PageID{
		"neighbour block": testPage(2, 0), "other part": testPage(1, 1), "other namespace": other,
	} {
		if c.Check(page, wrong) == -1 {
			t.Errorf("%s: taken for the right page", name)
		}
	}
	if (Content{Seed: 4}).Check(page, id) == -1 {
		t.Error("bytes of another seed were accepted")
	}
	if c.Check(page[:4064], id) == -1 {
		t.Error("a truncated page was accepted")
	}
	if c.Check(append(page[32:4096:4096], page[:32]...), id) == -1 {
		t.Error("a shifted page was accepted")
	}
}

func TestContentFindsEveryBitFlip(t *testing.T) {
	c := Content{Seed: 3}
	rng := rand.New(rand.NewPCG(1, 2))
	page := make([]byte, 4099)
	c.Fill(page, testPage(1, 0))
	for range 2000 {
		bit := rng.IntN(len(page) * 8)
		page[bit/8] ^= 1 << (bit % 8)
		at := c.Check(page, testPage(1, 0))
		if at < 0 || at > bit/8 || bit/8 >= at+32 {
			t.Fatalf("flipped bit %d (byte %d): found at %d", bit, bit/8, at)
		}
		page[bit/8] ^= 1 << (bit % 8)
	}
}

func BenchmarkContentCheck(b *testing.B) {
	page := make([]byte, 64<<10)
	Content{}.Fill(page, testPage(1, 0))
	b.SetBytes(int64(len(page)))
	for b.Loop() {
		if (Content{}).Check(page, testPage(1, 0)) != -1 {
			b.Fatal("wrong")
		}
	}
}

func BenchmarkContentFill(b *testing.B) {
	page := make([]byte, 64<<10)
	b.SetBytes(int64(len(page)))
	for b.Loop() {
		Content{}.Fill(page, testPage(1, 0))
	}
}
