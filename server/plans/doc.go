// Package plans carries out what operators plan: a node is emptied (drain), sessions
// move from nodes that have more than their share to others (rebalance).
//
// A plan is a record in the directory, with its steps and how far each is. The node that
// leads the directory drives the plans that run, one goroutine each; what it decides is a
// function of the record and of what it sees (decide), what it does goes through the
// directory, through a Mover, which moves one session, and to the node that is drained,
// which copies by itself what no other node holds (evacuation). A leader that dies leaves
// nothing behind but the record, from which the next one goes on: a move goes on by
// itself meanwhile, and an evacuation as long as its plan runs.
//
// A plan pauses while the cluster is not whole enough for it, and ends done, failed or
// cancelled, each with a reason. A drain is done only when the directory shows no session
// of the node, and the inventory of the node shows no block that no other node that is up
// holds, except those that were to be given up. It then leaves, and goes on to serve what
// it has until its process ends.
package plans
