package tier_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/ram"
	"github.com/kvtier/kvtier/tier/tiertest"
)

func TestListing(t *testing.T) {
	inBubble(t, func(t *testing.T, k *kit, disk *tiertest.Faulty) {
		k.toDisk(chain(1, 0, 30))
		k.put(chain(2, 0, 10), 0, 0, tier.CommitOptions{})
		var seen []paging.BlockName
		for q := (tier.BlockQuery{Limit: 7}); ; {
			blocks, err := k.Blocks(q)
			if err != nil {
				t.Fatal(err)
			}
			if len(blocks) == 0 {
				break
			}
			for _, b := range blocks {
				seen = append(seen, b.ID.Name)
			}
			q.After = &blocks[len(blocks)-1].ID
		}
		want := append(chain(1, 0, 30), chain(2, 0, 10)...)
		slices.SortFunc(want, func(a, b paging.BlockName) int { return slices.Compare(a[:], b[:]) })
		if !slices.Equal(seen, want) {
			t.Errorf("listed %d blocks, want %d in order", len(seen), len(want))
		}
		other := paging.NamespaceID{1}
		for _, x := range []struct {
			q    tier.BlockQuery
			want int
		}{
			{tier.BlockQuery{Tier: tier.NVMe}, 30}, {tier.BlockQuery{Tier: tier.RAM}, 10}, {tier.BlockQuery{Tier: tier.HBM}, 0},
			{tier.BlockQuery{Namespace: &k.id, Tenant: k.ns.Tenant}, 40}, {tier.BlockQuery{Namespace: &other}, 0},
			{tier.BlockQuery{Tenant: "nobody"}, 0}, {tier.BlockQuery{Prefix: want[5][:]}, 1},
		} {
			x.q.Limit = 100
			if got, err := k.Blocks(x.q); err != nil || len(got) != x.want {
				t.Errorf("%+v: %d blocks, want %d, %v", x.q, len(got), x.want, err)
			}
		}
		if _, err := k.Blocks(tier.BlockQuery{}); !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("no limit: %v", err)
		}
	})
}

func TestVerify(t *testing.T) {
	inBubble(t, func(t *testing.T, k *kit, disk *tiertest.Faulty) {
		name := chain(1, 5, 1)[0]
		k.put([]paging.BlockName{name}, 5, 0, tier.CommitOptions{Durable: true})
		id := paging.BlockID{Namespace: k.id, Name: name}
		info, pages, err := k.Block(t.Context(), id, true)
		if err != nil || len(pages) != 2 || pages[0].Verdict != "ok" || pages[1].Verdict != "ok" {
			t.Fatalf("%+v, %v", pages, err)
		}
		if info.Position != 5 || info.Leases != 0 || info.Bytes != pageBytes || !slices.Equal(info.Tiers(), []tier.Kind{tier.RAM, tier.NVMe}) {
			t.Errorf("%+v", info)
		}
		disk.SetLoad(func(context.Context, tier.Page) error { return paging.ErrCorrupt })
		if _, pages, err = k.Block(t.Context(), id, true); err != nil || pages[1].Verdict != "corrupt" {
			t.Errorf("%+v, %v", pages, err)
		}
		if ram, onDisk := k.where(name); !ram || onDisk {
			t.Errorf("after a bad copy was found: in RAM %v, on disk %v", ram, onDisk)
		}
		if _, _, err = k.Block(t.Context(), paging.BlockID{Namespace: k.id}, false); !errors.Is(err, paging.ErrNotFound) {
			t.Errorf("no such block: %v", err)
		}
	})
}

// Wrong arguments are refused before anything happens.
func TestWrongArguments(t *testing.T) {
	inRAM(t, func(t *testing.T, k *kit) {
		names := chain(1, 0, 2)
		soon := time.Now().Add(time.Minute)
		fetch := func(r tier.FetchRequest) error {
			_, err := k.Fetch(t.Context(), r)
			return err
		}
		reserve := func(r tier.ReserveRequest) error {
			_, _, _, err := k.Reserve(t.Context(), r)
			return err
		}
		bad := *k.ns
		bad.Layout.Parts = []paging.Part{{Name: "p", BlocksPerPage: 1}}
		_, badLayout := k.RegisterNamespace(&bad)
		_, lookup := k.Lookup(paging.NamespaceID{}, names, 0)
		for _, x := range []struct {
			what string
			err  error
			want error
		}{
			{"unknown namespace", fetch(tier.FetchRequest{Names: names}), paging.ErrUnknownNamespace},
			{"lookup there", lookup, paging.ErrUnknownNamespace},
			{"no names", fetch(tier.FetchRequest{Namespace: k.id}), paging.ErrInvalid},
			{"65,537 names", fetch(tier.FetchRequest{Namespace: k.id, Names: make([]paging.BlockName, 65537)}), paging.ErrInvalid},
			{"unknown part", fetch(tier.FetchRequest{Namespace: k.id, Names: names, Parts: 2}), paging.ErrInvalid},
			{"negative position", fetch(tier.FetchRequest{Namespace: k.id, Names: names, First: -1}), paging.ErrInvalid},
			{"another arena", fetch(tier.FetchRequest{Namespace: k.id, Names: names, Wanted: tier.HBM}), paging.ErrInvalid},
			{"unknown mode", fetch(tier.FetchRequest{Namespace: k.id, Names: names, Mode: 2}), paging.ErrInvalid},
			{"reserve nothing", reserve(tier.ReserveRequest{Namespace: k.id, Deadline: soon}), paging.ErrInvalid},
			{"unknown wanted part", reserve(tier.ReserveRequest{Namespace: k.id, Names: names, Want: 2, Deadline: soon}), paging.ErrInvalid},
			{"deadline has passed", reserve(tier.ReserveRequest{Namespace: k.id, Names: names, Deadline: time.Now()}), paging.ErrExpired},
			{"bad layout", badLayout, paging.ErrBadLayout},
		} {
			if !errors.Is(x.err, x.want) {
				t.Errorf("%s: got %v, want %v", x.what, x.err, x.want)
			}
		}
		if m := k.Metrics(); m.RequestedBlocks != 0 || m.Blocks != 0 || m.Holds != 0 {
			t.Errorf("something happened: %+v", m)
		}
	})
	for name, cfg := range map[string]tier.Config{
		"no arena":       {},
		"unknown policy": {Arena: openRAM(t, 1<<20, ram.Config{}), RAMPolicy: "clairvoyant"},
		"negative time":  {Arena: openRAM(t, 1<<20, ram.Config{}), FlushAfter: -1},
	} {
		if _, err := tier.Open(t.Context(), cfg); !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("%s: got %v, want %v", name, err, paging.ErrInvalid)
		}
	}
}

func TestMetricsAreSpelledOut(t *testing.T) {
	for r := tier.NoReason; r <= tier.Cancelled; r++ {
		if s := r.String(); s == "" || s == "unknown" || strings.ToLower(s) != s {
			t.Errorf("reason %d is %q", r, s)
		}
	}
}
