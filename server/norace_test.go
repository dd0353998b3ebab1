//go:build !race

package server_test

const raceEnabled = false

const slack = 2
