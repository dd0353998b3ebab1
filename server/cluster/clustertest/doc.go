// Package clustertest has what whole clusters in one process, in fake time, stand on: a
// network in memory whose ways can be cut, slowed and broken, and gossip that follows it.
// For tests only.
package clustertest
