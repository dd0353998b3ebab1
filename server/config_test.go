package server

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvtier/kvtier/paging"
)

func TestSize(t *testing.T) {
	for text, want := range map[string]Size{
		"0": 0, "4096": 4096, "1B": 1, "64KiB": 64 << 10, "1.5 GiB": 3 << 29, " 16GiB ": 16 << 30, "500MB": 5e8, "2TiB": 2 << 40,
	} {
		if got, err := ParseSize(text); err != nil || got != want {
			t.Errorf("%q: %d, %v, want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "G", "16G", "16 gib", "-1", "-1GiB", "1e30GiB", "NaN", "9223372036854775808", "0x10"} {
		if got, err := ParseSize(text); !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("%q: %d, %v, want ErrInvalid", text, got, err)
		}
	}
	for _, s := range []Size{0, 1, 4096, 4097, 64 << 20, 3 << 29, 16 << 30, 5 << 40} {
		if got, err := ParseSize(s.String()); err != nil || got != s {
			t.Errorf("%d became %q and then %d, %v", s, s, got, err)
		}
	}
}

func TestDefaultsAreValid(t *testing.T) {
	if err := (Config{}).Validate(); err != nil {
		t.Errorf("the zero configuration: %v", err)
	}
	if err := (Config{Dir: "/var/lib/kvtier"}).Validate(); err != nil {
		t.Errorf("with a directory: %v", err)
	}
	if got := (Config{Dir: "x"}).WithDefaults(); got.NVMeBytes == 0 || got.HandoffSocket != "/run/kvtier/kvtier-fd.sock" {
		t.Errorf("nvme %v, handoff-socket %q", got.NVMeBytes, got.HandoffSocket)
	}
}

func TestValidateNamesEveryProblem(t *testing.T) {
	node := -1
	long := "/" + strings.Repeat("d/", 60) + "s"
	secret := "a-secret-of-some-length"
	for _, c := range []struct {
		name string
		cfg  Config
		want []string
	}{
		{"many", Config{RAMBytes: 5, NVMeBytes: 1 << 30, Socket: long, LeaseTTL: 1, MaxAttachments: -1, NUMANode: &node},
			[]string{"ram:", "nvme:", "socket:", "lease-ttl:", "max-attachments:", "numa-node:", "staging:"}},
		{"same socket", Config{Socket: "/a", HandoffSocket: "/a"}, []string{"handoff-socket:"}},
		{"half of tls", Config{TLS: TLS{Cert: "c"}}, []string{"tls: cert and key"}},
		{"client auth without ca", Config{TLS: TLS{Cert: "c", Key: "k", ClientAuth: true}}, []string{"tls.client-auth:"}},
		{"bad address", Config{Listen: "nowhere"}, []string{"listen:"}},
		{"bad port", Config{HTTPListen: "127.0.0.1:99999"}, []string{"http-listen:"}},
		{"all interfaces", Config{Listen: ":7440", HTTPListen: "0.0.0.0:7445"}, []string{"listen: :7440", "http-listen: 0.0.0.0:7445"}},
		{"tls alone", Config{Listen: "10.0.0.1:7440", TLS: TLS{Cert: "c", Key: "k"}}, []string{"listen:"}},
		{"a name", Config{Listen: "node1.example:7440"}, []string{"listen:"}},
		{"tenants", Config{Tenants: []Tenant{
			{Name: "a", UIDs: []uint32{1}, Tokens: []Token{{Secret: "short"}, {Secret: secret, Role: "king"}}},
			{Name: "a", UIDs: []uint32{1}, Tokens: []Token{{Secret: secret}}},
			{Name: "x y"},
		}}, []string{"tenants[0].tokens[0]:", "tenants[0].tokens[1].role:", "tenants[1].name:", "tenants[1].uids:", "tenants[1].tokens[0]:", "tenants[2].name:"}},
	} {
		err := c.cfg.Validate()
		if !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("%s: got %v, want ErrInvalid", c.name, err)
			continue
		}
		for _, want := range c.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %q is missing in:\n%v", c.name, want, err)
			}
		}
	}
}

func TestListenersThatMayFaceTheNetwork(t *testing.T) {
	secure := TLS{Cert: "c", Key: "k"}
	token := []Tenant{{Name: "a", Tokens: []Token{{Secret: "a-secret-of-some-length"}}}}
	for name, cfg := range map[string]Config{
		"loopback 4":   {Listen: "127.0.0.1:7440"},
		"loopback 6":   {Listen: "[::1]:7440"},
		"localhost":    {Listen: "localhost:7440"},
		"tls, tokens":  {Listen: "0.0.0.0:7440", TLS: secure, Tenants: token},
		"mutual tls":   {Listen: "[::]:7440", TLS: TLS{Cert: "c", Key: "k", CA: "ca", ClientAuth: true}},
		"told so":      {Listen: ":7440", HTTPListen: ":7445", Insecure: true},
		"none at all":  {Listen: Off, HTTPListen: Off},
		"chosen later": {Listen: "127.0.0.1:0"},
	} {
		if err := cfg.Validate(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestFieldsHideSecretsAndShowOrigins(t *testing.T) {
	cfg := Config{
		RAMBytes: 1 << 30, Tenants: []Tenant{{Name: "a", Tokens: []Token{{Secret: "a-secret-of-some-length"}}}},
		Origins: map[string]string{"ram": "flag", "tls.cert": "file"}, TLS: TLS{Cert: "c.pem", Key: "k.pem"},
	}
	byName := map[string]Field{}
	for _, f := range cfg.Fields() {
		if _, twice := byName[f.Name]; twice || f.Name == "" {
			t.Errorf("field %q stands twice or has no name", f.Name)
		}
		if strings.Contains(f.Value, "secret") {
			t.Errorf("%s shows a secret: %q", f.Name, f.Value)
		}
		byName[f.Name] = f
	}
	for name, want := range map[string]Field{
		"ram":       {"ram", "1GiB", "flag"},
		"tls.cert":  {"tls.cert", "c.pem", "file"},
		"lease-ttl": {"lease-ttl", "1m0s", "default"},
		"tenants":   {"tenants", "a (0 uids, 1 tokens)", "default"},
		"numa-node": {"numa-node", "", "default"},
	} {
		if byName[name] != want {
			t.Errorf("%s: got %+v, want %+v", name, byName[name], want)
		}
	}
}

func TestIdentityIsKeptAndIncarnationRises(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	first, err := openDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := first.raise(); err != nil {
		t.Fatal(err)
	}
	if _, err := openDir(dir); !errors.Is(err, paging.ErrUnavailable) {
		t.Errorf("a second node on the directory: %v, want unavailable", err)
	}
	first.close()
	second, err := openDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer second.close()
	if err := second.raise(); err != nil {
		t.Fatal(err)
	}
	if second.identity.node != first.identity.node || second.identity.incarnation != first.identity.incarnation+1 {
		t.Errorf("after a restart %+v, before %+v", second.identity, first.identity)
	}
}

func TestForeignDirectoriesAreLeftAsTheyAre(t *testing.T) {
	for name, files := range map[string]map[string]string{
		"somebody's files": {"thesis.tex": "text"},
		"newer format":     {identityFile: `{"format":2,"node":"00112233445566778899aabbccddeeff","incarnation":3}`},
		"damaged":          {identityFile: `{"format":`},
		"short id":         {identityFile: `{"format":1,"node":"0011","incarnation":3}`},
	} {
		dir := t.TempDir()
		for file, text := range files {
			if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := openDir(dir); !errors.Is(err, paging.ErrIncompatible) {
			t.Errorf("%s: got %v, want incompatible", name, err)
		}
		entries, err := os.ReadDir(dir)
		if err != nil || len(entries) != len(files) {
			t.Errorf("%s: the directory holds %v, %v", name, entries, err)
		}
		for file, text := range files {
			if got, err := os.ReadFile(filepath.Join(dir, file)); err != nil || string(got) != text {
				t.Errorf("%s: %s is %q now, %v", name, file, got, err)
			}
		}
	}
}
