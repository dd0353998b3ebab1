package bench

import (
	"bytes"
	"errors"
	"os/exec"
	"testing"
)

func TestRedisRoundTrip(t *testing.T) {
	r, err := startRedis(t.Context(), t.TempDir(), 64<<20)
	if errors.Is(err, exec.ErrNotFound) {
		t.Skip("redis-server is not installed")
	}
	if err != nil {
		t.Fatal(err)
	}
	defer r.close()
	var keys [][]byte
	var want []byte
	for i := range 10 {
		key, value := []byte{byte(i), '\r', '\n'}, bytes.Repeat([]byte{byte(i), '\n', '$'}, 1000)
		if err := r.set(key, value); err != nil {
			t.Fatal(err)
		}
		keys, want = append(keys, key), append(want, value...)
	}
	for _, depth := range []int{1, 3, 64} {
		got := make([]byte, len(want))
		if err := r.get(keys, got, depth); err != nil || !bytes.Equal(got, want) {
			t.Errorf("depth %d: wrong values, %v", depth, err)
		}
	}
	if err := r.get([][]byte{[]byte("absent")}, make([]byte, 10), 1); err == nil {
		t.Error("an absent key was no error")
	}
}
