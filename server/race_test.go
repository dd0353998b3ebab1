//go:build race

package server_test

const raceEnabled = true

// slack is how much longer than promised things may take in tests: this build is slow,
// and other tests run beside it.
const slack = 5
