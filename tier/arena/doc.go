// Package arena keeps the extents of a tier whose pages are read in place, each
// of one tenant, and the slots in them. What an extent is made of, and how bytes
// get into it, is up to the driver: tier/ram, tier/hbm.
//
// Extents are created one after another in the background, so the arena is usable
// with the first. A tenant gets extents from a common pool as it needs them; each
// tenant with a quota is sure of one. An extent that is wholly empty can go to
// another tenant that has less than its share: as new memory under a new number,
// since descriptors that were handed out can not be called back. Whoever still
// holds the old one sees old bytes of its own tenant.
//
// Every slot that is allocated gets a new generation, in all units that it
// covers, before a byte of it is written.
//
// The hard budget covers extents, and what SetAside takes for memory that lies
// elsewhere (staging). Before an extent is created, the memory that the machine
// can give is asked for; too little stops growth, is reported by Usage, and is
// tried again.
//
// Goroutines, both ended by Stop: one that creates extents, one that tells
// tenants of them.
package arena
