// Package ram keeps pages in shared memory that engines map: sealed memfd
// extents (package arena), each with a table of slot generations at its start.
package ram
