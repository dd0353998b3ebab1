// Package cluster is a node's part in a cluster: it joins the tiers of the node
// with the directory of who holds what and with the transport of pages.
//
// To package tier it is what other nodes hold (tier.Peers): where a Fetch falls
// short of what this node has, the local replica of the directory says who claims
// the rest, and the transport brings it from there. To the other nodes it is what
// this node holds: it claims what the tiers tell of their changes, and serves pages
// from where they lie.
//
// A claim is a hint. Its owner is asked, and may say no; a node that has just said
// no is not asked for the same block again for a while (hints.go), and an owner that
// is asked for what it does not have compares its claims with its inventory.
//
// # Goroutines
//
// One that tells changes to the claimer, one that checks copies that arrived
// damaged elsewhere, one that looks after nodes and namespaces and, on the leader,
// after the states of all nodes. Close joins them.
package cluster
