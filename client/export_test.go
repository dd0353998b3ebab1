package client

import "google.golang.org/grpc/mem"

// WithPool is cfg with another pool for received frames.
func WithPool(cfg Config, p mem.BufferPool) Config {
	cfg.pool = p
	return cfg
}
