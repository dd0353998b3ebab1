// Package hbm keeps pages in the memory of a device (package gpu): pool memory
// that engines map read-only and whose pages attention kernels read in place.
//
// Extents are those of package arena, each one exported allocation of the device
// with nothing but slots in it; the table of their generations lies beside it, in
// shared memory that the CPU reads. All extents are equally long and each has a
// place, so that an engine can map them into one range of addresses: the slot at
// offset o of the extent at place p is at p × ExtentBytes + o of the range, always
// a multiple of paging.UnitBytes.
//
// Pages come in and go out in batches on streams of the device. The checksum of a
// page is computed on the device after it came in and before it goes out: nothing
// but a convention keeps other processes from writing to a pool of CUDA, and a
// damaged copy is dropped.
//
// A device that does not answer for half a minute takes no more pages: the tier is
// in bypass for good, and what it held is fetched from below.
package hbm
