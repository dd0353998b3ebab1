package kvstatus

import (
	"strings"

	kvtierv1 "github.com/kvtier/kvtier/proto/kvtier/v1"
)

// Word is the lower-case name of a verdict, such as "hit_here".
func Word(v kvtierv1.Verdict) string {
	return strings.ToLower(strings.TrimPrefix(v.String(), "VERDICT_"))
}
