package bench

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// Report is what a workload found. Its JSON form is one object whose keys are
// stable: bytes are integers, rates bytes/s, ratios and hit rates fractions,
// fields ending in _us quantiles in microseconds.
type Report interface {
	// Rows is the report as a table for people.
	Rows() []Row
	// Err is nil if everything that must be zero is, and every identity holds.
	Err() error
}

// Row is one line of a table: a name, a value, and what to hold it against.
type Row struct {
	Name, Value, Beside string
}

// WriteTable prints a report for people.
func WriteTable(w io.Writer, r Report) error {
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	for _, row := range r.Rows() {
		line := row.Name + "\t" + row.Value
		if row.Beside != "" {
			line += "\t" + row.Beside
		}
		fmt.Fprintln(tw, line)
	}
	return tw.Flush()
}

// Quantiles of a set of measured times, in microseconds.
type Quantiles struct {
	P50 float64 `json:"p50"`
	P95 float64 `json:"p95"`
	P99 float64 `json:"p99"`
	Max float64 `json:"max"`
}

// String is the quantiles for people.
func (q Quantiles) String() string {
	return fmt.Sprintf("p50 %s  p95 %s  p99 %s  max %s", micros(q.P50), micros(q.P95), micros(q.P99), micros(q.Max))
}

// HitByTier counts blocks by the tier they were served from.
type HitByTier struct {
	HBM    int64 `json:"hbm"`
	RAM    int64 `json:"ram"`
	NVMe   int64 `json:"nvme"`
	Remote int64 `json:"remote"`
}

// Sum is the blocks of all tiers.
func (h HitByTier) Sum() int64 { return h.HBM + h.RAM + h.NVMe + h.Remote }

// BytesByPath counts payload bytes by the way they went.
type BytesByPath struct {
	InPlace    int64 `json:"in_place"`    // read in the shared mapping, not copied
	Staged     int64 `json:"staged"`      // committed out of staging: copied once
	StreamRead int64 `json:"stream_read"` // read over the page stream
	StreamSent int64 `json:"stream_sent"` // written over the page stream
	NVMeRead   int64 `json:"nvme_read"`   // page bytes that the node read from its disk for requests
}

// PolicyReport is the answer of "bench policy".
type PolicyReport struct {
	Trace       string  `json:"trace"`
	Policy      string  `json:"policy"`
	Capacity    int64   `json:"capacity"` // blocks
	BlockTokens int64   `json:"block_tokens"`
	Requests    int64   `json:"requests"`
	Blocks      int64   `json:"blocks"`
	Hit         float64 `json:"hit"`
	TokenHit    float64 `json:"token_hit"`
	BestHit     float64 `json:"best_hit"` // block hits of a cache of this capacity that knows the future
	Evicted     int64   `json:"evicted"`
}

// Rows implements Report.
func (r *PolicyReport) Rows() []Row {
	return []Row{
		{"policy", r.Policy, fmt.Sprintf("%d blocks of %d tokens", r.Capacity, r.BlockTokens)},
		{"trace", r.Trace, fmt.Sprintf("%d requests, %d blocks", r.Requests, r.Blocks)},
		{"block hit rate", rate4(r.Hit), "of at most " + rate4(r.BestHit) + " with knowledge of the future"},
		{"token hit rate", rate4(r.TokenHit), ""},
		{"blocks evicted", fmt.Sprint(r.Evicted), ""},
	}
}

// Err implements Report: a simulation cannot fail.
func (r *PolicyReport) Err() error { return nil }

// ReplayReport is the answer of "bench replay".
type ReplayReport struct {
	Requests            int64       `json:"requests"`
	ServedRequests      int64       `json:"served_requests"`
	UnavailableRequests int64       `json:"unavailable_requests"` // asked while the node was down
	FailedRequests      int64       `json:"failed_requests"`      // any other error, or a missed deadline
	Blocks              int64       `json:"blocks"`
	HitBlocks           int64       `json:"hit_blocks"` // verified by the client
	Hit                 float64     `json:"hit"`
	BestHit             float64     `json:"best_hit"` // the most that any cache could hit
	HitByTier           HitByTier   `json:"hit_by_tier"`
	TokenHit            float64     `json:"token_hit"`
	BestTokenHit        float64     `json:"best_token_hit"`
	WrongPages          int64       `json:"wrong_pages"`         // bytes that are not the page's
	LostPages           int64       `json:"lost_pages"`          // reused under a lease
	PhantomBlocks       int64       `json:"phantom_blocks"`      // served though never committed
	CorruptPages        int64       `json:"corrupt_pages"`       // found by the node and turned into misses
	DurableBlocks       int64       `json:"durable_blocks"`      // acknowledged as durable before a kill
	LostDurableBlocks   int64       `json:"lost_durable_blocks"` // of these, absent after the restart
	CommittedBlocks     int64       `json:"committed_blocks"`    // stored new
	RefusedBlocks       int64       `json:"refused_blocks"`      // not stored: no room in time
	RecoveredPages      int64       `json:"recovered_pages"`     // verified right after the last restart
	AuditedPages        int64       `json:"audited_pages"`       // stored before that restart
	Kills               int64       `json:"kills"`               // daemon killed and started again
	FlippedBits         int64       `json:"flipped_bits"`        // in segment files, on purpose
	Seconds             float64     `json:"seconds"`             // of the whole run
	RestartSeconds      float64     `json:"restart_seconds"`     // the longest, kill to ready
	FetchUS             Quantiles   `json:"fetch_us"`            // lookup of the prefix to lease
	CommitUS            Quantiles   `json:"commit_us"`           // per round
	BytesByPath         BytesByPath `json:"bytes_by_path"`
	DecodedRequests     int64       `json:"decoded_requests"`       // attention over fetched pages, in place
	WrongDecodes        int64       `json:"wrong_decodes"`          // of these, further from float64 than the tolerance; wrong_pages counts them too
	DecodeRelErr        float64     `json:"decode_relerr"`          // the worst of them
	FirstErrors         []string    `json:"first_errors,omitempty"` // at most maxErrors
}

// Rows implements Report.
func (r *ReplayReport) Rows() []Row {
	rows := []Row{
		{"requests", fmt.Sprint(r.Requests), fmt.Sprintf("%d served, %d while the node was down, %d failed", r.ServedRequests, r.UnavailableRequests, r.FailedRequests)},
		{"hit rate, blocks", rate4(r.Hit), fmt.Sprintf("of at most %s with any cache (%d of %d blocks)", rate4(r.BestHit), r.HitBlocks, r.Blocks)},
		{"hit rate, tokens", rate4(r.TokenHit), fmt.Sprintf("of at most %s", rate4(r.BestTokenHit))},
		{"  hits from HBM", fmt.Sprint(r.HitByTier.HBM), share(r.HitByTier.HBM, r.HitBlocks)},
		{"  hits from RAM", fmt.Sprint(r.HitByTier.RAM), share(r.HitByTier.RAM, r.HitBlocks)},
		{"  hits from NVMe", fmt.Sprint(r.HitByTier.NVMe), share(r.HitByTier.NVMe, r.HitBlocks)},
		{"stored", fmt.Sprint(r.CommittedBlocks), fmt.Sprintf("%d blocks found no room", r.RefusedBlocks)},
		{"read in place", FormatBytes(r.BytesByPath.InPlace), "copied: nothing"},
		{"written", FormatBytes(r.BytesByPath.Staged), "copied once, out of staging"},
	}
	if n := r.BytesByPath.StreamRead + r.BytesByPath.StreamSent; n > 0 {
		rows = append(rows, Row{"streamed", FormatBytes(n), "client is not co-located"})
	}
	rows = append(rows,
		Row{"fetch", r.FetchUS.String(), ""},
		Row{"commit", r.CommitUS.String(), ""},
		Row{"wrong pages", fmt.Sprint(r.WrongPages), "must be 0"},
		Row{"lost pages", fmt.Sprint(r.LostPages), "must be 0: a leased page stays"},
		Row{"phantom blocks", fmt.Sprint(r.PhantomBlocks), "must be 0"},
		Row{"corrupt pages", fmt.Sprint(r.CorruptPages), "found by the node, served as misses"},
	)
	if r.DecodedRequests > 0 {
		rows = append(rows, Row{"attention in place", fmt.Sprintf("%d requests", r.DecodedRequests), fmt.Sprintf("%d wrong; relative error at most %.1g against float64", r.WrongDecodes, r.DecodeRelErr)})
	}
	if r.FlippedBits > 0 {
		rows = append(rows, Row{"bits flipped on disk", fmt.Sprint(r.FlippedBits), "on purpose, while the node was down"})
	}
	if r.Kills > 0 {
		rows = append(rows,
			Row{"kills (SIGKILL)", fmt.Sprint(r.Kills), fmt.Sprintf("ready again after at most %.2f s", r.RestartSeconds)},
			Row{"recovered pages", fmt.Sprint(r.RecoveredPages), fmt.Sprintf("of the %d that were stored before it, all verified", r.AuditedPages)},
			Row{"lost durable blocks", fmt.Sprint(r.LostDurableBlocks), fmt.Sprintf("of %d, must be 0", r.DurableBlocks)},
		)
	}
	rows = append(rows, Row{"time", fmt.Sprintf("%.1f s", r.Seconds), ""})
	for _, e := range r.FirstErrors {
		rows = append(rows, Row{"error", e, ""})
	}
	return rows
}

// Err implements Report.
func (r *ReplayReport) Err() error {
	var errs []error
	if r.Requests != r.ServedRequests+r.UnavailableRequests+r.FailedRequests {
		errs = append(errs, fmt.Errorf("%d requests are not %d served + %d unavailable + %d failed", r.Requests, r.ServedRequests, r.UnavailableRequests, r.FailedRequests))
	}
	if r.HitBlocks != r.HitByTier.Sum() {
		errs = append(errs, fmt.Errorf("%d hits are not the %d of the tiers", r.HitBlocks, r.HitByTier.Sum()))
	}
	for _, c := range []struct {
		n    int64
		what string
	}{
		{r.WrongPages, "wrong pages"}, {r.LostPages, "pages lost under a lease"}, {r.PhantomBlocks, "phantom blocks"},
		{r.LostDurableBlocks, "lost durable blocks"}, {r.FailedRequests, "failed requests"},
		{r.undamaged(), "corrupt pages although nothing was damaged"},
	} {
		if c.n != 0 {
			errs = append(errs, fmt.Errorf("%d %s", c.n, c.what))
		}
	}
	return errors.Join(errs...)
}

// undamaged is the corrupt pages that nobody asked for: a killed process loses
// no byte that it wrote, so a page is right or absent.
func (r *ReplayReport) undamaged() int64 {
	if r.FlippedBits > 0 {
		return 0
	}
	return r.CorruptPages
}

// DemoReport is the answer of "demo": a replay with a kill in the middle.
type DemoReport struct {
	ReplayReport
}

// LocalReport is the answer of "bench local".
type LocalReport struct {
	PageBytes        int64      `json:"page_bytes"`
	ResidentBlocks   int        `json:"resident_blocks"`
	Calls            int        `json:"calls"` // of each kind
	Fetch64US        Quantiles  `json:"fetch64_us"`
	EmptyCallUS      Quantiles  `json:"empty_call_us"`
	Ratio            float64    `json:"ratio"`
	UnaryFetch64US   Quantiles  `json:"unary_fetch64_us"`
	UnaryEmptyCallUS Quantiles  `json:"unary_empty_call_us"`
	UnaryRatio       float64    `json:"unary_ratio"`
	ReleaseUS        Quantiles  `json:"release_us"` // the client's one-way call
	BytesCopied      int64      `json:"bytes_copied"`
	WrongPages       int64      `json:"wrong_pages"`
	IdleBytes        int64      `json:"idle_bytes"` // memory of the node beside its arenas, before the first client
	RedisGet64US     *Quantiles `json:"redis_get64_us,omitempty"`
	RedisDepth       int        `json:"redis_depth,omitempty"` // pipelined GETs, the best of several
}

// Rows implements Report.
func (r *LocalReport) Rows() []Row {
	rows := []Row{
		{"workload", fmt.Sprintf("64 pages of %s", FormatBytes(r.PageBytes)), fmt.Sprintf("%d resident blocks, %d calls of each kind, alternating", r.ResidentBlocks, r.Calls)},
		{"fetch, stream", r.Fetch64US.String(), ""},
		{"empty call, stream", r.EmptyCallUS.String(), ""},
		{"ratio", ratio2(r.Ratio), "goal at most 1.30"},
		{"fetch, unary", r.UnaryFetch64US.String(), ""},
		{"empty call, unary", r.UnaryEmptyCallUS.String(), ""},
		{"ratio", ratio2(r.UnaryRatio), "goal at most 1.30"},
		{"release, one-way", r.ReleaseUS.String(), "outside the timed region"},
		{"bytes copied", fmt.Sprint(r.BytesCopied), "must be 0"},
		{"idle node", FormatBytes(r.IdleBytes), "of memory beside its arenas, goal at most 100 MiB"},
		{"wrong pages", fmt.Sprint(r.WrongPages), "must be 0"},
	}
	if r.RedisGet64US != nil {
		rows = append(rows, Row{"redis GET, same bytes", r.RedisGet64US.String(),
			fmt.Sprintf("%.0f times the fetch; %d GETs in a pipeline", r.RedisGet64US.P50/r.Fetch64US.P50, r.RedisDepth)})
	} else {
		rows = append(rows, Row{"redis GET, same bytes", "not measured", "redis-server is not installed"})
	}
	return rows
}

// Err implements Report.
func (r *LocalReport) Err() error {
	if r.BytesCopied != 0 || r.WrongPages != 0 {
		return fmt.Errorf("%d bytes copied, %d wrong pages: both must be 0", r.BytesCopied, r.WrongPages)
	}
	return nil
}

// NVMeReport is the answer of "bench nvme".
type NVMeReport struct {
	PageBytes           int64     `json:"page_bytes"`
	Bytes               int64     `json:"bytes"` // written by each side
	WriteBytesPerS      float64   `json:"write_bytes_per_s"`
	ReadBytesPerS       float64   `json:"read_bytes_per_s"`
	RawWriteBytesPerS   float64   `json:"raw_write_bytes_per_s"`
	RawReadBytesPerS    float64   `json:"raw_read_bytes_per_s"`
	WriteRatio          float64   `json:"write_ratio"`
	ReadRatio           float64   `json:"read_ratio"`
	WriteAmplification  float64   `json:"write_amplification"`
	SpaceAmplification  float64   `json:"space_amplification"`
	ReadUnderWriteUS    Quantiles `json:"read_under_write_us"`
	CachedBytes         int64     `json:"cached_bytes"` // of the files in the page cache when the cold read began
	WrongPages          int64     `json:"wrong_pages"`
	Read4BytesPerS      float64   `json:"read4_bytes_per_s"` // 4 readers
	RawRead4BytesPerS   float64   `json:"raw_read4_bytes_per_s"`
	Write2MBytesPerS    float64   `json:"write_2m_bytes_per_s"` // pages of 2 MiB
	RawWrite2MBytesPerS float64   `json:"raw_write_2m_bytes_per_s"`
	Read2MBytesPerS     float64   `json:"read_2m_bytes_per_s"`
	RawRead2MBytesPerS  float64   `json:"raw_read_2m_bytes_per_s"`
}

// Rows implements Report.
func (r *NVMeReport) Rows() []Row {
	beside := func(ours, raw float64) string {
		return fmt.Sprintf("%s of the raw file's %s", ratio2(ours/raw), formatRate(raw))
	}
	return []Row{
		{"workload", FormatBytes(r.Bytes), fmt.Sprintf("pages of %s, 2 writers, 1 reader, alternating with a raw file", FormatBytes(r.PageBytes))},
		{"write", formatRate(r.WriteBytesPerS), beside(r.WriteBytesPerS, r.RawWriteBytesPerS) + ", goal at least 0.80"},
		{"read, cold", formatRate(r.ReadBytesPerS), beside(r.ReadBytesPerS, r.RawReadBytesPerS) + ", goal at least 0.85"},
		{"write amplification", ratio2(r.WriteAmplification), "goal at most 1.15"},
		{"space amplification", ratio2(r.SpaceAmplification), "after writing twice the budget, goal at most 1.20"},
		{"read while writing", r.ReadUnderWriteUS.String(), ""},
		{"read, 4 readers", formatRate(r.Read4BytesPerS), beside(r.Read4BytesPerS, r.RawRead4BytesPerS)},
		{"write, 2 MiB pages", formatRate(r.Write2MBytesPerS), beside(r.Write2MBytesPerS, r.RawWrite2MBytesPerS)},
		{"read, 2 MiB pages", formatRate(r.Read2MBytesPerS), beside(r.Read2MBytesPerS, r.RawRead2MBytesPerS)},
		{"in the page cache", FormatBytes(r.CachedBytes), "when the cold read began"},
		{"wrong pages", fmt.Sprint(r.WrongPages), "must be 0"},
	}
}

// Err implements Report.
func (r *NVMeReport) Err() error {
	if r.WrongPages != 0 {
		return fmt.Errorf("%d wrong pages", r.WrongPages)
	}
	if r.CachedBytes > 0 {
		return fmt.Errorf("%s were in the page cache when the cold read began: the read is not cold", FormatBytes(r.CachedBytes))
	}
	return nil
}

// CommitReport is the answer of "bench commit".
type CommitReport struct {
	PageBytes               int64     `json:"page_bytes"`
	BatchPages              int       `json:"batch_pages"`
	Bytes                   int64     `json:"bytes"`
	CommitBytesPerS         float64   `json:"commit_bytes_per_s"`
	MemcpyChecksumBytesPerS float64   `json:"memcpy_checksum_bytes_per_s"`
	Ratio                   float64   `json:"ratio"`
	CommitUS                Quantiles `json:"commit_us"`
}

// Rows implements Report.
func (r *CommitReport) Rows() []Row {
	return []Row{
		{"workload", FormatBytes(r.Bytes), fmt.Sprintf("%d pages of %s a commit", r.BatchPages, FormatBytes(r.PageBytes))},
		{"commit", formatRate(r.CommitBytesPerS), r.CommitUS.String()},
		{"memcpy, then XXH3", formatRate(r.MemcpyChecksumBytesPerS), ""},
		{"ratio", ratio2(r.Ratio), "goal at least 0.90"},
	}
}

// Err implements Report.
func (r *CommitReport) Err() error { return nil }

// IndexReport is the answer of "bench index".
type IndexReport struct {
	Pages        int64   `json:"pages"`
	BytesPerPage float64 `json:"bytes_per_page"` // of memory, index and policies of the tiers
	LoadS        float64 `json:"load_s"`
	HeapBytes    int64   `json:"heap_bytes"`
}

// Rows implements Report.
func (r *IndexReport) Rows() []Row {
	return []Row{
		{"pages on NVMe", fmt.Sprint(r.Pages), ""},
		{"memory per page", fmt.Sprintf("%.1f B", r.BytesPerPage), "goal at most 200 B"},
		{"load at start", fmt.Sprintf("%.2f s", r.LoadS), ""},
		{"heap", FormatBytes(r.HeapBytes), ""},
	}
}

// Err implements Report.
func (r *IndexReport) Err() error { return nil }

// CrashReport is the answer of "bench crash".
type CrashReport struct {
	Seed              uint64   `json:"seed"`
	Rounds            int      `json:"rounds"`
	CommittedBlocks   int64    `json:"committed_blocks"`
	DurableBlocks     int64    `json:"durable_blocks"`
	LostDurableBlocks int64    `json:"lost_durable_blocks"`
	CheckedBlocks     int64    `json:"checked_blocks"`
	RecoveredBlocks   int64    `json:"recovered_blocks"`
	WrongPages        int64    `json:"wrong_pages"`
	PhantomBlocks     int64    `json:"phantom_blocks"`
	LostPages         int64    `json:"lost_pages"`    // reused under a lease
	CorruptPages      int64    `json:"corrupt_pages"` // nothing was damaged: a page is right or absent
	LeakedBytes       int64    `json:"leaked_bytes"`  // of the NVMe budget, in no page and not free
	FailedRequests    int64    `json:"failed_requests"`
	RecoveryMS        float64  `json:"recovery_ms"` // the worst, kill to ready
	Seconds           float64  `json:"seconds"`
	FirstErrors       []string `json:"first_errors,omitempty"`
}

// Rows implements Report.
func (r *CrashReport) Rows() []Row {
	rows := []Row{
		{"rounds", fmt.Sprint(r.Rounds), fmt.Sprintf("seed %d", r.Seed)},
		{"blocks committed", fmt.Sprint(r.CommittedBlocks), fmt.Sprintf("%d as durable", r.DurableBlocks)},
		{"blocks recovered", fmt.Sprint(r.RecoveredBlocks), fmt.Sprintf("of %d checked", r.CheckedBlocks)},
		{"lost durable blocks", fmt.Sprint(r.LostDurableBlocks), "must be 0"},
		{"wrong pages", fmt.Sprint(r.WrongPages), "must be 0"},
		{"phantom blocks", fmt.Sprint(r.PhantomBlocks), "must be 0"},
		{"leaked bytes", fmt.Sprint(r.LeakedBytes), "must be 0"},
		{"failed requests", fmt.Sprint(r.FailedRequests), "must be 0"},
		{"corrupt pages", fmt.Sprint(r.CorruptPages), "must be 0: nothing was damaged"},
		{"lost pages", fmt.Sprint(r.LostPages), "must be 0: a leased page stays"},
		{"recovery", fmt.Sprintf("%.0f ms", r.RecoveryMS), "the worst; goal at most 5000 ms"},
		{"time", fmt.Sprintf("%.1f s", r.Seconds), ""},
	}
	for _, e := range r.FirstErrors {
		rows = append(rows, Row{"error", e, ""})
	}
	return rows
}

// Err implements Report.
func (r *CrashReport) Err() error {
	if r.LostDurableBlocks|r.WrongPages|r.LostPages|r.PhantomBlocks|r.CorruptPages|r.LeakedBytes|r.FailedRequests == 0 {
		return nil
	}
	return fmt.Errorf("%d lost durable blocks, %d wrong, %d lost and %d corrupt pages, %d phantom blocks, %d leaked bytes, %d failed requests: all must be 0",
		r.LostDurableBlocks, r.WrongPages, r.LostPages, r.CorruptPages, r.PhantomBlocks, r.LeakedBytes, r.FailedRequests)
}

// FormatBytes is n for people, in binary units: "1.5 GiB".
func FormatBytes(n int64) string {
	const units = "KMGTPE"
	if n < 1024 && n > -1024 {
		return fmt.Sprintf("%d B", n)
	}
	f, unit := float64(n)/1024, 0
	for f >= 1024 || f <= -1024 {
		f, unit = f/1024, unit+1
	}
	s := fmt.Sprintf("%.1f", f)
	return strings.TrimSuffix(s, ".0") + " " + units[unit:unit+1] + "iB"
}

func formatRate(bytesPerS float64) string {
	return fmt.Sprintf("%.2f GB/s", bytesPerS/1e9)
}

func micros(us float64) string {
	switch {
	case us >= 1e6:
		return fmt.Sprintf("%.2f s", us/1e6)
	case us >= 1e4:
		return fmt.Sprintf("%.1f ms", us/1e3)
	case us >= 1e3:
		return fmt.Sprintf("%.2f ms", us/1e3)
	}
	if us < 10 {
		return fmt.Sprintf("%.1f us", us)
	}
	return fmt.Sprintf("%.0f us", us)
}

func rate4(f float64) string  { return strings.TrimPrefix(fmt.Sprintf("%.4f", f), "0") }
func ratio2(f float64) string { return fmt.Sprintf("%.2f", f) }

func share(n, of int64) string {
	if of == 0 {
		return ""
	}
	return fmt.Sprintf("%.0f %%", 100*float64(n)/float64(of))
}
