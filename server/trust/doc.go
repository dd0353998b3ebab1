// Package trust says who is who by certificate. It makes a development
// authority and what it signs, reads an identity out of a certificate, and holds
// the certificate, key and authority of a node as they are in their files now.
//
// # Identity
//
// One authority signs everything of one cluster. A certificate of kvtier has one
// URI that names its holder:
//
//	kvtier://CLUSTER/node/NAME
//	kvtier://CLUSTER/client/NAME?role=ROLE&tenant=TENANT
//
// A certificate of the same authority without such a URI is nobody: it proves
// that its holder may open a connection, never more. A URI that is not exactly
// of this form is refused, so that no later word in it can be overlooked.
//
// # Source
//
// Source reads its three files when somebody shakes hands, at most once in
// CheckEvery, and takes new ones as soon as they are good as a whole. Files that
// are not keep the old ones in use; that is logged once and told by State. What
// is connected stays connected. A Source has no goroutine and nothing to close;
// all its methods may be called from many goroutines.
//
//	src, err := trust.Open(trust.Files{Cert: "node.pem", Key: "node-key.pem", CA: "ca.pem"}, log)
//	mux, err := transport.OpenMux(transport.MuxConfig{TLS: src.Peers(), ...})
package trust
