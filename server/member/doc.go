// Package member turns gossip into immutable views of the cluster. It decides
// nothing, moves no ownership and carries no data: a view is a hint about who is
// alive and where.
//
// Gossip is bound to one cluster by a label (the cluster's UUID) and encrypted
// with the cluster's key: packets of others are dropped and counted. A node
// keeps its name, the hex of its id, over restarts and changes of address; the
// start with the higher incarnation is believed.
//
// The library calls back under its own lock: the callbacks here only note what
// changed and wake the one goroutine that builds the next view.
package member
