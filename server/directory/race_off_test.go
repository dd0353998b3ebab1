//go:build !race

package directory

const randomSteps = 100_000

const linearOps = 12_000
