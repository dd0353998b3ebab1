//go:build race

package directory

// Under the race detector a step costs thirty times as much.
const randomSteps = 4_000

const linearOps = 4_000
