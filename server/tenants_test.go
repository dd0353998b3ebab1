package server_test

const (
	tokenA = "the-token-of-tenant-a"
	tokenB = "the-token-of-tenant-b"
)
