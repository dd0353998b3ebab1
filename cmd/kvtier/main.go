// Command kvtier is the node of the KV-cache tiering service, the tools that
// look at a node, and the benchmarks that measure one.
//
// Commands are built by functions and bind flags; what they do lives in the
// packages server, client and bench. Exit codes: 0 done, 1 failed, 2 usage or
// configuration.
package main

import (
	"os"
)

// version is set at link time.
var version = "dev"

func main() {
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}
