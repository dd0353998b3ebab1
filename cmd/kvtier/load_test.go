package main

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
)

func writeConfig(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "kvtier.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func parsedFlags(t *testing.T, args ...string) *pflag.FlagSet {
	t.Helper()
	flags := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	bindFlags(flags)
	if err := flags.Parse(args); err != nil {
		t.Fatal(err)
	}
	return flags
}

func TestPrecedence(t *testing.T) {
	l := loader{
		file:  writeConfig(t, "ram: 2GiB\nnvme: 3GiB\nflush-after: 1s\nsocket: /from/file.sock\n"),
		env:   []string{"KVTIER_NVME=4GiB", "KVTIER_FLUSH_AFTER=2s", "HOME=/x"},
		flags: parsedFlags(t, "--flush-after", "3s"),
	}
	c, err := l.load()
	if err != nil {
		t.Fatal(err)
	}
	if c.RAMBytes != 2<<30 || c.NVMeBytes != 4<<30 || c.FlushAfter != 3*time.Second || c.LeaseTTL != time.Minute {
		t.Errorf("ram %v nvme %v flush-after %v lease-ttl %v, want 2GiB 4GiB 3s 1m", c.RAMBytes, c.NVMeBytes, c.FlushAfter, c.LeaseTTL)
	}
	for name, want := range map[string]string{"ram": originFile, "nvme": originEnv, "flush-after": originFlag, "lease-ttl": originDefault} {
		if c.origin[name] != want {
			t.Errorf("origin of %s: %s, want %s", name, c.origin[name], want)
		}
	}
	if got := c.withDefaults().HandoffSocket; got != "/from/kvtier-fd.sock" {
		t.Errorf("hand-off socket %s is not beside the socket", got)
	}
}

// TestEverySetting gives each setting by file, environment and flag: a setting
// that one of them cannot reach fails here.
func TestEverySetting(t *testing.T) {
	d := defaultConfig()
	for _, s := range settings(&d) {
		value := show(s.field)
		for source, l := range map[string]loader{
			originFile: {file: writeConfig(t, yamlPair(s.name, value))},
			originEnv:  {env: []string{envName(s.name) + "=" + value}},
			originFlag: {flags: parsedFlags(t, "--"+flagName(s.name)+"="+value)},
		} {
			c := &loaded{nodeConfig: defaultConfig(), origin: map[string]string{}}
			all := settings(&c.nodeConfig)
			errs := append(append(l.readFile(c, all), l.readEnv(c, all)...), l.readFlags(c, all)...)
			if len(errs) > 0 || c.origin[s.name] != source {
				t.Errorf("%s from %s: origin %q, errors %v", s.name, source, c.origin[s.name], errs)
			}
		}
	}
}

func yamlPair(name, value string) string {
	outer, inner, nested := strings.Cut(name, ".")
	if nested {
		return outer + ":\n  " + inner + ": \"" + value + "\"\n"
	}
	return name + ": \"" + value + "\"\n"
}

// TestEveryFieldIsASetting fails when the node's configuration gets a field that
// no file, variable or flag can set.
func TestEveryFieldIsASetting(t *testing.T) {
	c := defaultConfig()
	known := append(names(settings(&c)), tenantsKey)
	for _, f := range c.Fields() {
		if !slices.Contains(known, f.Name) {
			t.Errorf("%s of the node's configuration is no setting", f.Name)
		}
	}
}

func TestConfigErrors(t *testing.T) {
	for _, c := range []struct {
		name, yaml string
		env, args  []string
		want       []string // each in the error
	}{
		{name: "typo in the file", yaml: "ram: 1GiB\nnmve: 1GiB\n", want: []string{":2: unknown setting nmve: did you mean nvme?"}},
		{name: "underscore", yaml: "flush_after: 1s\n", want: []string{"did you mean flush-after?"}},
		{name: "typo in the environment", env: []string{"KVTIER_SOKET=/x"}, want: []string{"unknown setting KVTIER_SOKET: did you mean KVTIER_SOCKET?"}},
		{name: "nothing near", yaml: "completely-else: 1\n", want: []string{"unknown setting completely-else: kvtier serve --help"}},
		{name: "twice", yaml: "ram: 1GiB\nram: 2GiB\n", want: []string{"ram"}},
		{name: "no size", args: []string{"--ram", "lots"}, want: []string{`ram: size "lots"`}},
		{name: "no duration", env: []string{"KVTIER_LEASE_TTL=5"}, want: []string{"lease-ttl", "is no duration"}},
		{name: "list", yaml: "ram: [1GiB]\n", want: []string{"ram: want one value"}},
		{name: "not a mapping", yaml: "- ram\n", want: []string{"want a list of"}},
		{name: "two documents", yaml: "ram: 1GiB\n---\nram: 2GiB\n", want: []string{"more than one document"}},
		{name: "tenant key", yaml: "tenants:\n- name: a\n  uid: 3\n", want: []string{"tenants", "uid"}},
		{name: "everything at once", yaml: "ram: 1KiB\nlog-level: loud\nmax-attachments: -1\nlisten: 0.0.0.0:7440\ntls:\n  cert: /x\n",
			want: []string{"ram: 1KiB", "log-level", "max-attachments", "listen: 0.0.0.0:7440", "tls: cert and key"}},
		{name: "typo in a nested key", yaml: "tls:\n  crt: /x\n", want: []string{":2: unknown setting tls.crt: did you mean tls.cert?"}},
		{name: "tenants", yaml: "tenants:\n- name: a\n  uids: [1]\n- name: b\n  uids: [1]\n  ram: 1 parsec\n", want: []string{"parsec"}},
		{name: "metrics in the open", args: []string{"--http-listen", "0.0.0.0:7445"}, want: []string{"http-listen"}},
		{name: "a name of two lines", args: []string{"--name", "a\nb"}, want: []string{"name: "}},
		{name: "a cluster without a data directory", args: []string{"--bootstrap", "--nvme", "0"}, want: []string{"nvme: 0 gives up the data directory"}},
		{name: "long socket", args: []string{"--socket", "/" + strings.Repeat("x", 120)}, want: []string{"socket: the path has 121 bytes"}},
		{name: "policy", args: []string{"--policy", "lfru"}, want: []string{`policy: "lfru": want one of`}},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := loader{env: c.env, flags: parsedFlags(t, c.args...)}
			if c.yaml != "" {
				l.file = writeConfig(t, c.yaml)
			}
			_, err := l.load()
			var usage *usageError
			if !errors.As(err, &usage) {
				t.Fatalf("error %v is no usage error", err)
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error lacks %q:\n%v", want, err)
				}
			}
		})
	}
}

func TestForeignEnvironmentIsIgnored(t *testing.T) {
	_, err := loader{env: []string{
		"KVTIER_PORT=tcp://10.0.0.1:7440", "KVTIER_SERVICE_HOST=10.0.0.1", "KVTIER_SERVICE_PORT_GRPC=7440",
		"KVTIER_PORT_7440_TCP_ADDR=10.0.0.1", "KVTIER_SABOTAGE=skip-verify", "KVTIER_TOKEN=x",
	}}.load()
	if err != nil {
		t.Error(err)
	}
}

func FuzzConfig(f *testing.F) {
	f.Add("ram: 1GiB\ntenants:\n- name: a\n  uids: [1]\n")
	f.Add("ram: {a: 1}\n? [x]\n: y\n")
	f.Add("&a ram: *a\n")
	f.Fuzz(func(t *testing.T, text string) {
		c := &loaded{nodeConfig: defaultConfig(), origin: map[string]string{}}
		errs := readYAML(c, settings(&c.nodeConfig), "f.yaml", []byte(text))
		if len(errs) == 0 {
			c.problems()
		}
	})
}
