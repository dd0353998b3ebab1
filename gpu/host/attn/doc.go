// Package attn is paged decode attention on the CPU: it reads K and V rows where they lie, through a block table, and is
// bound by memory. It is the attention kernel of the host device and the yardstick for kernels on other devices.
//
// A block is 16 tokens. The outer loop walks the blocks of a sequence, the inner one the KV heads, and each call of an
// assembly function handles one block for 4 query heads of one KV head while it prefetches the same rows of the next
// block: a loop over heads outside would touch each page once per head, with a stride that no hardware prefetcher
// follows. Larger groups of query heads take several calls, which find the rows in the first-level cache; smaller ones
// are padded, which costs nothing that memory does not hide.
//
// Scores are kept in units of log2, so that the softmax needs 2^x only. Everything is float32 inside. The functions come
// from the generator in gen/, are chosen at run time, and exist for AVX-512 and AVX2; every other processor runs the
// portable Go form of the same steps, which is some 30 times slower.
//
// A Decoder has no state: its methods may be called from any goroutine, each call starts and joins its own workers.
package attn
