package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/tier"
	"github.com/kvtier/kvtier/tier/nvme"
)

// NVMeConfig describes "bench nvme".
type NVMeConfig struct {
	Bytes    int64 // that each side holds, a multiple of 64 MiB
	Rounds   int
	TempDir  string
	Progress Progress
}

const (
	nvmePage      = 256 << 10
	nvmeLargePage = 2 << 20
	nvmeChunk     = 256 << 20 // at most written by one side before the other's turn
	nvmeWriters   = 2
	nvmeBatch     = 32       // pages of one Store, and
	nvmeBatchMost = 16 << 20 // their bytes at most: as the Hierarchy demotes them
	rawDepth      = 8        // writes that the tier has on their way: the raw file may have as many
	nvmeReaders   = 4
	readStretches = 8
)

// NVMe measures the tier against a raw O_DIRECT file. The raw file's writes are
// taken at the depth at which it is fastest: the number of writers, or the
// number of writes that the tier itself keeps on their way.
func NVMe(ctx context.Context, cfg NVMeConfig) (_ *NVMeReport, err error) {
	work, err := NewWorkspace(cfg.TempDir, 5*cfg.Bytes)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, work.Close()) }()
	b := &disk{cfg: &cfg, dir: work.Dir, rng: rand.New(rand.NewPCG(1, 2))}
	if b.chunk, err = alignedMemory(min(nvmeChunk, cfg.Bytes/4)); err != nil {
		return nil, err
	}
	defer unix.Munmap(b.chunk) //nolint:errcheck // mapped above
	rep := &NVMeReport{PageBytes: nvmePage, Bytes: cfg.Bytes}
	b.step = stepper(cfg.Progress, b.steps())
	if err := b.small(ctx, rep); err != nil {
		return nil, err
	}
	if err := b.large(ctx, rep); err != nil {
		return nil, fmt.Errorf("pages of 2 MiB: %w", err)
	}
	rep.WriteRatio = rep.WriteBytesPerS / rep.RawWriteBytesPerS
	rep.ReadRatio = rep.ReadBytesPerS / rep.RawReadBytesPerS
	rep.WrongPages = b.wrong
	return rep, nil
}

// disk is one run.
type disk struct {
	cfg   *NVMeConfig
	dir   string
	chunk []byte
	rng   *rand.Rand
	step  func() // called at each chunk written or read by the tier
	wrong int64
}

// steps is how often step is called: chunks written in rounds, with large pages
// and as churn, and stretches read.
func (b *disk) steps() int64 {
	chunks := b.cfg.Bytes / int64(len(b.chunk))
	return chunks*int64(b.cfg.Rounds) + chunks + 2*chunks + 3*readStretches
}

// store is a tier with the pages that it holds.
type store struct {
	*disk
	tier    *nvme.Tier
	ns      paging.Namespace
	id      paging.NamespaceID
	content Content
	config  nvme.Config
	page    int
	pages   []tier.Page // by number
	refs    []tier.Ref  // 0: not stored
}

func (b *disk) newStore(ctx context.Context, name string, page int, bytes int64) (*store, error) {
	s := &store{disk: b, page: page, ns: namespaceOf("nvme", 16, int64(page))}
	s.ns.Tenant = "default"
	s.id = s.ns.ID()
	// An eighth more than what is kept: a freed slot is free again only once its
	// record is gone, and nobody shall wait for that.
	budget := bytes + bytes/8
	s.config = nvme.Config{Dir: filepath.Join(b.dir, name), BudgetBytes: budget, AheadBytes: budget}
	for i := range int(bytes) / page {
		id := paging.PageID{BlockID: paging.BlockID{Namespace: s.id, Name: TraceBlock(uint64(i))}}
		s.pages = append(s.pages, tier.Page{ID: id, Key: paging.StorageKey(s.id, id.Name, 0), Bytes: uint32(page)})
	}
	s.refs = make([]tier.Ref, len(s.pages))
	if err := s.open(ctx); err != nil {
		return nil, err
	}
	if err := s.awaitPrewritten(ctx); err != nil {
		return nil, errors.Join(err, s.tier.Close())
	}
	return s, nil
}

func (s *store) open(ctx context.Context) (err error) {
	if s.tier, err = nvme.Open(s.config); err != nil {
		return err
	}
	byKey := make(map[paging.Key]int, len(s.pages))
	for i := range s.pages {
		byKey[s.pages[i].Key] = i
	}
	clear(s.refs)
	err = s.tier.Recover(ctx, func(r tier.Record) (uint32, bool) {
		i, ok := byKey[r.Key]
		if ok {
			s.refs[i], s.pages[i] = r.Ref, r.Page
		}
		return uint32(i), ok
	}, nil)
	return errors.Join(err, s.tier.PutNamespace(&s.ns))
}

// awaitPrewritten waits until the tier has all its segments: like the raw file,
// they are written once before anything is measured.
func (s *store) awaitPrewritten(ctx context.Context) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for s.tier.Usage().HeldBytes+s.config.BudgetBytes/16 < s.config.BudgetBytes {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// prepare fills the chunk with pages from one on and sums them.
func (s *store) prepare(first int) (count int) {
	count = min(len(s.chunk)/s.page, len(s.pages)-first)
	for i := range count {
		b := s.chunk[i*s.page:][:s.page]
		s.content.Fill(b, s.pages[first+i].ID)
		s.pages[first+i].Sum = paging.Checksum(b)
	}
	return count
}

// write stores prepared pages with two writers.
func (s *store) write(ctx context.Context, first, count int) error {
	size := min(nvmeBatch, nvmeBatchMost/s.page)
	return parallel(nvmeWriters, (count+size-1)/size, func(_, batch int) error {
		from := batch * size
		to := min(from+size, count)
		src, owners := make([][]byte, 0, size), make([]uint32, 0, size)
		for i := from; i < to; i++ {
			src, owners = append(src, s.chunk[i*s.page:][:s.page]), append(owners, uint32(first+i))
		}
		return s.tier.Store(ctx, s.pages[first+from:first+to], src, owners, s.refs[first+from:first+to])
	})
}

// free gives pages back.
func (s *store) free(first, count int) {
	refs := s.refs[first : first+count]
	s.tier.Free(refs...)
	clear(refs)
}

// read loads pages in the given order with so many readers and checks every byte.
func (s *store) read(ctx context.Context, order []int, readers int, dst []byte) error {
	wrong := make([]int64, readers)
	err := parallel(readers, len(order), func(w, i int) error {
		page, buf := order[i], dst[w*s.page:][:s.page]
		if err := s.tier.Load(ctx, s.pages[page], s.refs[page], buf); err != nil {
			return err
		}
		if s.content.Check(buf, s.pages[page].ID) >= 0 {
			wrong[w]++
		}
		return nil
	})
	for _, n := range wrong {
		s.wrong += n
	}
	return err
}

// small measures pages of 256 KiB: writes, cold reads, churn.
func (b *disk) small(ctx context.Context, rep *NVMeReport) (err error) {
	s, err := b.newStore(ctx, "tier", nvmePage, b.cfg.Bytes)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.tier.Close()) }()
	raw, err := newRawFile(filepath.Join(b.dir, "raw"), b.cfg.Bytes, b.chunk)
	if err != nil {
		return err
	}
	defer raw.f.Close()
	ours, theirs, err := b.writeRounds(ctx, s, raw, b.cfg.Rounds)
	if err != nil {
		return fmt.Errorf("write: %w", err)
	}
	rep.WriteBytesPerS, rep.RawWriteBytesPerS = ours, theirs
	if err := s.reopenCold(ctx, rep); err != nil {
		return err
	}
	if rep.ReadBytesPerS, rep.RawReadBytesPerS, err = b.readRounds(ctx, s, raw, 1); err != nil {
		return fmt.Errorf("read: %w", err)
	}
	if rep.Read4BytesPerS, rep.RawRead4BytesPerS, err = b.readRounds(ctx, s, raw, nvmeReaders); err != nil {
		return fmt.Errorf("read: %w", err)
	}
	return b.churn(ctx, s, rep)
}

// large measures pages of 2 MiB: writes and reads.
func (b *disk) large(ctx context.Context, rep *NVMeReport) (err error) {
	s, err := b.newStore(ctx, "tier2m", nvmeLargePage, b.cfg.Bytes)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.tier.Close()) }()
	raw, err := newRawFile(filepath.Join(b.dir, "raw2m"), b.cfg.Bytes, b.chunk)
	if err != nil {
		return err
	}
	defer raw.f.Close()
	if rep.Write2MBytesPerS, rep.RawWrite2MBytesPerS, err = b.writeRounds(ctx, s, raw, 1); err != nil {
		return err
	}
	rep.Read2MBytesPerS, rep.RawRead2MBytesPerS, err = b.readRounds(ctx, s, raw, 1)
	return err
}

// writeRounds writes everything over and over, chunk by chunk, the sides in
// turn; in the last round all pages are stored. Rates are medians over chunks.
func (b *disk) writeRounds(ctx context.Context, s *store, raw *rawFile, rounds int) (ours, theirs float64, err error) {
	var tierRates []float64
	var rawRates [2][]float64
	for round := range rounds {
		for first := 0; first < len(s.pages); {
			if round > 0 {
				s.free(first, min(len(s.chunk)/s.page, len(s.pages)-first))
			}
			count := s.prepare(first)
			src, at := s.chunk[:count*s.page], int64(first*s.page)
			rate, err := timed(len(src), func() error { return s.write(ctx, first, count) })
			if err != nil {
				return 0, 0, err
			}
			tierRates = append(tierRates, rate)
			for i, depth := range [...]int{nvmeWriters, rawDepth} {
				if rate, err = timed(len(src), func() error { return raw.write(src, at, s.page, depth) }); err != nil {
					return 0, 0, err
				}
				rawRates[i] = append(rawRates[i], rate)
			}
			first += count
			b.step()
		}
	}
	return median(tierRates), max(median(rawRates[0]), median(rawRates[1])), nil
}

// readRounds reads every page in random order, in stretches, the sides in turn.
func (b *disk) readRounds(ctx context.Context, s *store, raw *rawFile, readers int) (ours, theirs float64, err error) {
	order := b.rng.Perm(len(s.pages))
	var tierRates, rawRates []float64
	for i := range readStretches {
		part := order[i*len(order)/readStretches : (i+1)*len(order)/readStretches]
		b.step()
		bytes := len(part) * s.page
		rate, err := timed(bytes, func() error { return s.read(ctx, part, readers, s.chunk) })
		if err != nil {
			return 0, 0, err
		}
		tierRates = append(tierRates, rate)
		rate, err = timed(bytes, func() error {
			return parallel(readers, len(part), func(w, i int) error {
				buf := s.chunk[w*s.page:][:s.page]
				if _, err := raw.f.ReadAt(buf, int64(part[i]*s.page)); err != nil {
					return err
				}
				if s.content.Check(buf, s.pages[part[i]].ID) >= 0 {
					return fmt.Errorf("raw file: page %d: %w", part[i], paging.ErrCorrupt)
				}
				return nil
			})
		})
		if err != nil {
			return 0, 0, err
		}
		rawRates = append(rawRates, rate)
	}
	return median(tierRates), median(rawRates), nil
}

// reopenCold closes the tier, which drops its block cache, drops the page cache
// of its files, and opens it again.
func (s *store) reopenCold(ctx context.Context, rep *NVMeReport) error {
	if err := s.tier.Close(); err != nil {
		return err
	}
	var err error
	if rep.CachedBytes, err = dropCaches(s.dir); err != nil {
		return err
	}
	if err := s.open(ctx); err != nil {
		return err
	}
	for i, ref := range s.refs {
		if ref == 0 {
			return fmt.Errorf("page %d is gone after reopening: %w", i, paging.ErrNotFound)
		}
	}
	return nil
}

// churn replaces random runs of pages until twice the budget was written while
// one reader reads others, and measures what it costs.
func (b *disk) churn(ctx context.Context, s *store, rep *NVMeReport) error {
	var times Latency
	var pageBytes int64
	dst, err := alignedMemory(nvmePage)
	if err != nil {
		return err
	}
	defer unix.Munmap(dst) //nolint:errcheck // mapped above
	before, err := writtenBytes()
	if err != nil {
		return err
	}
	half := len(s.pages) / 2 // the first half is read, the second replaced; then the other way round
	for turn := 0; pageBytes < 2*b.cfg.Bytes; turn++ {
		first, readFirst := half, 0
		if turn%2 == 1 {
			first, readFirst = 0, half
		}
		first += b.rng.IntN(max(1, half-len(s.chunk)/s.page+1))
		s.free(first, min(len(s.chunk)/s.page, half))
		count := min(s.prepare(first), half)
		stop := make(chan struct{})
		done := make(chan error)
		go func() { done <- s.readUntil(ctx, stop, readFirst, half, dst, &times) }() // owner: churn; ends with stop
		err := s.write(ctx, first, count)
		close(stop)
		if err := errors.Join(err, <-done); err != nil {
			return fmt.Errorf("churn: %w", err)
		}
		pageBytes += int64(count * s.page)
		b.step()
	}
	after, err := writtenBytes()
	if err != nil {
		return err
	}
	space, err := diskBytes(s.config.Dir)
	rep.ReadUnderWriteUS = times.Quantiles()
	rep.WriteAmplification = float64(after-before) / float64(pageBytes)
	rep.SpaceAmplification = float64(space) / float64(s.tier.Usage().PageBytes)
	return err
}

func (s *store) readUntil(ctx context.Context, stop <-chan struct{}, first, count int, dst []byte, times *Latency) error {
	rng := rand.New(rand.NewPCG(3, 4))
	for {
		select {
		case <-stop:
			return nil
		default:
		}
		start := time.Now()
		if err := s.read(ctx, []int{first + rng.IntN(count)}, 1, dst); err != nil {
			return err
		}
		times.Add(time.Since(start))
	}
}

// timed returns bytes per second.
func timed(bytes int, do func() error) (float64, error) {
	start := time.Now()
	err := do()
	return float64(bytes) / time.Since(start).Seconds(), err
}
