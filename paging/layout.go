package paging

// Layout is the complete description of what page bytes mean. Every field is
// hashed into the namespace id; two layouts that differ in any field never
// share a page. Field meanings and bounds: proto/kvtier/v1/types.proto.
type Layout struct {
	Model         string
	Revision      string
	DType         string
	KVDType       string
	Attention     string
	Layers        uint32
	KVHeads       uint32
	HeadDim       uint32
	EngineLayout  string
	EngineEpoch   uint32
	TP, PP, CP    uint32
	ISA           string
	HashAlgorithm string
	HashSeed      string
	BlockTokens   uint32
	Parts         []Part
}

// Part is one slice of a block that one reader needs.
type Part struct {
	Name          string
	PageBytes     uint64
	BlocksPerPage uint32   // blocks that one page covers; the page lies at the last of them
	LastBlocks    uint32   // only the last n blocks before the point of reuse; 0: every block
	Ranks         []uint32 // ranks that read it, rising; empty: all
}

// Namespace is a layout used by one tenant with one cache salt.
type Namespace struct {
	Layout Layout
	Tenant string
	Salt   []byte
}
