package server

import "github.com/kvtier/kvtier/server/rpc"

// Node is what the services call.
func (s *Server) Node() rpc.Node { return s.node }
