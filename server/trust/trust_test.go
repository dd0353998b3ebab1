package trust

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io/fs"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/kvtier/kvtier/paging"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestIdentityIsReadBack(t *testing.T) {
	ca, _ := newCA(t, "prod-1")
	for _, id := range []Identity{
		{Kind: Node, Name: "a.example.org"},
		{Kind: Client, Name: "vllm_1", Role: RoleEngine, Tenant: "chat"},
		{Kind: Client, Name: "ops", Role: RoleOperator},
		{Kind: Client, Name: "grafana", Role: RoleReadOnly, Tenant: "t-0.1_x"},
	} {
		pair, err := ca.Issue(Request{Identity: id}, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		id.Cluster = "prod-1"
		got, err := Identify(pair.Leaf)
		if err != nil {
			t.Errorf("%s: %v", id, err)
		}
		if diff := cmp.Diff(id, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", id, diff)
		}
	}
}

func TestIdentitiesThatAreNone(t *testing.T) {
	for _, uris := range []string{
		"kvtier://c/node/", "kvtier://c/node", "kvtier:///node/a", "kvtier://c/king/a", "kvtier://c/node/a/b", "kvtier://c/node/a?role=operator",
		"kvtier://c/client/a", "kvtier://c/client/a?role=root", "kvtier://c/client/a?role=engine", "kvtier://c/client/a?role=engine&tenant=x%2Fy",
		"kvtier://c/client/a?role=operator&role=engine", "kvtier://c/client/a?role=operator&scope=x", "kvtier://c/client/a?role=operator#x",
		"kvtier://u@c/node/a", "kvtier://c:1/node/a", "kvtier://c.d/node/a", "kvtier://-c/node/a", "kvtier:c/node/a",
		"kvtier://c/node/a kvtier://c/node/b",
	} {
		cert := &x509.Certificate{}
		for u := range strings.FieldsSeq(uris) {
			parsed, err := url.Parse(u)
			if err != nil {
				t.Fatal(err)
			}
			cert.URIs = append(cert.URIs, parsed)
		}
		if id, err := Identify(cert); !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("%s: %v, %v; want %v", uris, id, err, paging.ErrInvalid)
		}
	}
	other := &x509.Certificate{URIs: []*url.URL{{Scheme: "spiffe", Host: "c", Path: "/node/a"}}}
	if id, err := Identify(other); err != nil || id.Kind != Nobody {
		t.Errorf("a URI of somebody else: %v, %v", id, err)
	}
}

func TestRequestsThatCannotBe(t *testing.T) {
	ca, _ := newCA(t, "c")
	node := Identity{Kind: Node, Name: "a"}
	for what, r := range map[string]Request{
		"nobody":            {},
		"engine, no tenant": {Identity: Identity{Kind: Client, Name: "a", Role: RoleEngine}},
		"role":              {Identity: Identity{Kind: Client, Name: "a", Role: "root"}},
		"node with a role":  {Identity: Identity{Kind: Node, Name: "a", Role: RoleOperator}},
		"name":              {Identity: Identity{Kind: Node, Name: "a/b"}},
		"host":              {Identity: node, Hosts: []string{"a b"}},
		"client's host":     {Identity: Identity{Kind: Client, Name: "a", Role: RoleOperator}, Hosts: []string{"h"}},
		"short life":        {Identity: node, Life: time.Second},
	} {
		if _, err := ca.Issue(r, time.Now()); !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("%s: %v, want %v", what, err, paging.ErrInvalid)
		}
	}
	if _, err := ca.Issue(Request{Identity: node}, time.Now().Add(2*AuthorityLife)); !errors.Is(err, paging.ErrInvalid) {
		t.Errorf("after the authority's end: %v", err)
	}
	// A certificate does not outlive its authority.
	pair, err := ca.Issue(Request{Identity: node, Life: 2 * AuthorityLife}, time.Now())
	if err != nil || pair.Leaf.NotAfter.After(ca.cert.NotAfter) {
		t.Errorf("valid until %v, the authority until %v (%v)", pair.Leaf.NotAfter, ca.cert.NotAfter, err)
	}
	for _, cluster := range []string{"", "a.b", "a_b", "-a", strings.Repeat("a", 64)} {
		if _, _, err := NewAuthority(cluster, time.Now(), time.Hour); !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("authority of %q: %v", cluster, err)
		}
	}
}

func TestAuthorityIsReadBack(t *testing.T) {
	_, one := newCA(t, "one")
	_, two := newCA(t, "two")
	a, err := LoadAuthority(one.Cert, one.Key)
	if err != nil || a.Cluster() != "one" {
		t.Fatalf("%v, %v", a, err)
	}
	leaf, err := a.Issue(Request{Identity: Identity{Kind: Node, Name: "a"}}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	for what, pair := range map[string][2][]byte{
		"another's key": {one.Cert, two.Key}, "no authority": {leaf.Cert, leaf.Key}, "no key": {one.Cert, one.Cert}, "nothing": {nil, nil},
	} {
		if _, err := LoadAuthority(pair[0], pair[1]); !errors.Is(err, paging.ErrInvalid) {
			t.Errorf("%s: %v, want %v", what, err, paging.ErrInvalid)
		}
	}
}

func TestFilesAreNotReplacedByAccident(t *testing.T) {
	dir := t.TempDir()
	key, cert := filepath.Join(dir, "k"), filepath.Join(dir, "c")
	if err := WriteFiles([]File{{cert, []byte("old")}}, false); err != nil {
		t.Fatal(err)
	}
	both := []File{{key, []byte("new key")}, {cert, []byte("new cert")}}
	if err := WriteFiles(both, false); !errors.Is(err, fs.ErrExist) {
		t.Errorf("over an existing file: %v, want %v", err, fs.ErrExist)
	}
	if _, err := os.Stat(key); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("half of the pair was written: %v", err)
	}
	if err := WriteFiles(both, true); err != nil {
		t.Fatal(err)
	}
	for _, f := range both {
		got, err := os.ReadFile(f.Path)
		if err != nil || !bytes.Equal(got, f.Bytes) {
			t.Errorf("%s holds %q (%v)", f.Path, got, err)
		}
		if info, err := os.Stat(f.Path); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v (%v)", f.Path, info.Mode(), err)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 2 {
		t.Errorf("left behind: %v (%v)", left, err)
	}
}

func TestGossipKey(t *testing.T) {
	text := NewGossipKey()
	key, err := ParseGossipKey(text + "\n")
	if err != nil || len(key) != GossipKeyBytes || NewGossipKey() == text {
		t.Errorf("%x, %v", key, err)
	}
	for _, bad := range []string{"", "short", text[:20], text + text, "%%%"} {
		if _, err := ParseGossipKey(bad); !errors.Is(err, paging.ErrInvalid) || bad != "" && strings.Contains(err.Error(), bad) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	path := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadGossipKey(path); !errors.Is(err, paging.ErrInvalid) {
		t.Errorf("a file that others read: %v", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := ReadGossipKey(path); err != nil || !bytes.Equal(got, key) {
		t.Errorf("%x, %v; want %x", got, err, key)
	}
}

// fixture is the files of a node, and a clock for its Source.
type fixture struct {
	t     *testing.T
	files Files
	start time.Time
	ahead atomic.Int64 // of start
	log   bytes.Buffer
}

func newFixture(t *testing.T) *fixture {
	dir := t.TempDir()
	return &fixture{t: t, start: time.Now(), files: Files{Cert: filepath.Join(dir, "cert"), Key: filepath.Join(dir, "key"), CA: filepath.Join(dir, "ca")}}
}

func newCA(t testing.TB, cluster string) (*Authority, *Pair) {
	t.Helper()
	ca, pair, err := NewAuthority(cluster, time.Now(), AuthorityLife)
	if err != nil {
		t.Fatal(err)
	}
	return ca, pair
}

func (f *fixture) clock() time.Time         { return f.start.Add(time.Duration(f.ahead.Load())) }
func (f *fixture) advance(by time.Duration) { f.ahead.Add(int64(by)) }

func (f *fixture) put(path string, b []byte) {
	f.t.Helper()
	if err := os.WriteFile(path, b, 0o600); err != nil {
		f.t.Fatal(err)
	}
}

// issue writes the certificate of a node.
func (f *fixture) issue(ca *Authority, caPair *Pair, r Request) *Pair {
	f.t.Helper()
	pair, err := ca.Issue(r, f.clock())
	if err != nil {
		f.t.Fatal(err)
	}
	f.put(f.files.Key, pair.Key)
	f.put(f.files.Cert, pair.Cert)
	f.put(f.files.CA, caPair.Cert)
	return pair
}

func (f *fixture) open() *Source {
	f.t.Helper()
	s, err := open(f.files, slog.New(slog.NewTextHandler(&f.log, nil)), f.clock)
	if err != nil {
		f.t.Fatal(err)
	}
	return s
}

// in is whether the certificate in use is that of pair.
func in(s *Source, pair *Pair) bool {
	c, err := s.Certificate()
	return err == nil && bytes.Equal(c.Certificate[0], pair.Leaf.Raw)
}

func TestSourceTakesNewFilesAndKeepsOldOnes(t *testing.T) {
	f := newFixture(t)
	ca, caPair := newCA(t, "c")
	node := func(name string) Request {
		return Request{Identity: Identity{Kind: Node, Name: name}, Life: 24 * time.Hour}
	}
	first := f.issue(ca, caPair, node("first"))
	s := f.open()
	look := func() State {
		f.advance(CheckEvery)
		return s.State()
	}

	second := f.issue(ca, caPair, node("second"))
	if s.State().Identity.Name != "first" || !in(s, first) {
		t.Error("the files were looked at before it was time")
	}
	if st := look(); st.Identity.Name != "second" || st.Reloads != 1 || !in(s, second) {
		t.Errorf("new files: %+v", st)
	}
	if st := look(); st.Reloads != 1 {
		t.Errorf("the same files again: %+v", st)
	}

	// Between the two halves of a pair nothing is said.
	third, err := ca.Issue(node("third"), f.clock())
	if err != nil {
		t.Fatal(err)
	}
	f.put(f.files.Key, third.Key)
	if st := look(); st.Failures != 0 || st.Reason != "" || !in(s, second) {
		t.Errorf("half of a pair: %+v", st)
	}
	f.put(f.files.Cert, third.Cert)
	if st := look(); st.Identity.Name != "third" || st.Failures != 0 || st.Reloads != 2 {
		t.Errorf("both halves: %+v", st)
	}

	for what, spoil := range map[string]func(){
		"no certificate":  func() { f.put(f.files.Cert, []byte("no certificate")) },
		"another's key":   func() { f.put(f.files.Key, first.Key) },
		"empty authority": func() { f.put(f.files.CA, nil) },
		"no file":         func() { os.Remove(f.files.Key) },
		"too long":        func() { f.put(f.files.CA, make([]byte, maxFileBytes+1)) },
		"one that is over": func() {
			r := node("old")
			r.Life = time.Minute
			f.advance(-time.Hour)
			f.issue(ca, caPair, r)
			f.advance(time.Hour)
		},
		"unknown word in name": func() { f.put(f.files.Cert, unknownWord(t, ca, third)) },
	} {
		f.issue(ca, caPair, node("good"))
		before := look()
		if before.Reason != "" || before.Identity.Name != "good" {
			t.Fatalf("%s: before: %+v", what, before)
		}
		f.log.Reset()
		spoil()
		for range 4 {
			look()
		}
		st := s.State()
		if st.Identity.Name != "good" || st.Reloads != before.Reloads || st.Failures != before.Failures+1 || st.Reason == "" {
			t.Errorf("%s: %+v after %+v", what, st, before)
		}
		if n := strings.Count(f.log.String(), "new certificates are not used"); n != 1 {
			t.Errorf("%s: logged %d times, want once:\n%s", what, n, f.log.String())
		}
	}
}

// unknownWord is a certificate whose URI says something that this version does
// not know, for the key of pair.
func unknownWord(t *testing.T, ca *Authority, pair *Pair) []byte {
	t.Helper()
	template := *pair.Leaf
	template.URIs = []*url.URL{{Scheme: scheme, Host: "c", Path: "/node/x", RawQuery: "only=reads"}}
	p, err := x509.CreateCertificate(nil, &template, ca.cert, pair.Leaf.PublicKey, ca.key)
	if err != nil {
		t.Fatal(err)
	}
	return pemOf(p)
}

func TestSourceNeedsGoodFilesAtFirst(t *testing.T) {
	f := newFixture(t)
	if _, err := Open(f.files, nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no files: %v", err)
	}
	ca, caPair := newCA(t, "c")
	f.issue(ca, caPair, Request{Identity: Identity{Kind: Node, Name: "a"}})
	f.put(f.files.Cert, caPair.Cert)
	if _, err := Open(f.files, nil); !errors.Is(err, paging.ErrInvalid) || !strings.Contains(err.Error(), f.files.Cert) {
		t.Errorf("another's certificate: %v", err)
	}
	f.issue(ca, caPair, Request{Identity: Identity{Kind: Node, Name: "a"}})
	s, err := Open(Files{Cert: f.files.Cert, Key: f.files.Key}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Roots(); err == nil {
		t.Error("roots without an authority")
	}
	conf, err := s.Server(false).GetConfigForClient(&tls.ClientHelloInfo{})
	if err != nil || conf.ClientAuth != tls.NoClientCert {
		t.Errorf("without an authority: %v, %v", conf, err)
	}
}
