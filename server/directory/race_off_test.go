//go:build !race

package directory

const randomSteps = 100_000
