package bench

import "context"

// Sizes of the demo: the whole trace fits on the NVMe tier and a fraction of a
// per cent of a real node's memory is all that the RAM tier has, so that most
// hits come back from NVMe.
const (
	demoRAM        = 64 << 20
	demoNVMe       = 1 << 30
	demoHBM        = 64 << 20
	demoDecodes    = 48 // requests that are decoded with attention
	demoBlockBytes = 64 << 10
	// DefaultBlockTokens is the block of the public traces.
	DefaultBlockTokens = 512
)

// Demo replays the embedded trace through a node that is killed in the middle.
// node.Dir is set by it; RAM and NVMe that are 0 get the demo's sizes.
func Demo(ctx context.Context, node NodeConfig, tempDir string, progress Progress) (*DemoReport, error) {
	trace, err := OpenTrace(ShortTrace)
	if err != nil {
		return nil, err
	}
	if node.RAM == 0 {
		node.RAM, node.NVMe, node.HBM = demoRAM, demoNVMe, demoHBM
	}
	rep, err := Replay(ctx, ReplayConfig{
		Trace: trace, BlockBytes: demoBlockBytes, BlockTokens: DefaultBlockTokens, Clients: 1,
		KillAt: []float64{0.5}, DurableEvery: 8, Decodes: demoDecodes, Seed: 1, Node: node, TempDir: tempDir, Progress: progress,
	})
	if err != nil {
		return nil, err
	}
	return &DemoReport{ReplayReport: *rep}, nil
}
