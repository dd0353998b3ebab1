package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
)

// target is the node that a command asks: flags, else environment, else the
// socket on which a node of this user listens by default.
type target struct {
	socket, address, token          string
	tlsCA, tlsCert, tlsKey, tlsName string
	tls                             bool
}

func (t *target) bind(cmd *cobra.Command) {
	flags := cmd.PersistentFlags()
	flags.StringVar(&t.socket, "socket", "", "`path` of the node's socket; also KVTIER_SOCKET")
	flags.StringVar(&t.address, "address", "", "`host:port` of the node, instead of its socket; also KVTIER_ADDRESS")
	flags.StringVar(&t.token, "token", "", "bearer `token`, or @file; also KVTIER_TOKEN")
	flags.BoolVar(&t.tls, "tls", false, "use TLS with the system's roots of trust")
	flags.StringVar(&t.tlsCA, "tls-ca", "", "use TLS and trust this PEM `file`; also KVTIER_CA")
	flags.StringVar(&t.tlsCert, "tls-cert", "", "PEM `file` with the certificate to show")
	flags.StringVar(&t.tlsKey, "tls-key", "", "PEM `file` with its key")
	flags.StringVar(&t.tlsName, "tls-name", "", "`name` that the node's certificate must have; default: the host")
}

// config resolves the target. Its errors are usage errors.
func (t *target) config() (client.Config, error) {
	cfg := client.Config{Engine: "kvtier", EngineVersion: version, Socket: t.socket, Address: t.address}
	if cfg.Socket != "" && cfg.Address != "" {
		return cfg, usagef("--socket and --address: give one of them")
	}
	if cfg.Socket == "" && cfg.Address == "" {
		cfg.Address = os.Getenv("KVTIER_ADDRESS")
		if cfg.Address == "" {
			cfg.Socket = cmp.Or(os.Getenv("KVTIER_SOCKET"), defaultSocket())
		}
	}
	var err error
	if cfg.Token, err = secret(cmp.Or(t.token, os.Getenv("KVTIER_TOKEN"))); err != nil {
		return cfg, &usageError{fmt.Errorf("--token: %w", err)}
	}
	if cfg.Address != "" {
		if cfg.TLS, err = t.tlsConfig(cfg.Address); err != nil {
			return cfg, &usageError{err}
		}
	}
	return cfg, nil
}

// secret is a value, or what a file holds if it is written @file.
func secret(text string) (string, error) {
	name, isFile := strings.CutPrefix(text, "@")
	if !isFile {
		return text, nil
	}
	data, err := os.ReadFile(name)
	return strings.TrimSpace(string(data)), err
}

// tlsConfig is how to reach address by TLS; nil: without.
func (t *target) tlsConfig(address string) (*tls.Config, error) {
	ca := cmp.Or(t.tlsCA, os.Getenv("KVTIER_CA"))
	if ca == "" && !t.tls && t.tlsCert == "" {
		return nil, nil //nolint:nilnil // plaintext
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS13, ServerName: t.tlsName}
	if ca != "" {
		pem, err := os.ReadFile(ca)
		if err != nil {
			return nil, fmt.Errorf("--tls-ca: %w", err)
		}
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("--tls-ca: %s holds no certificate", ca)
		}
	}
	if (t.tlsCert == "") != (t.tlsKey == "") {
		return nil, errors.New("--tls-cert and --tls-key: give both")
	}
	if t.tlsCert != "" {
		pair, err := tls.LoadX509KeyPair(t.tlsCert, t.tlsKey)
		if err != nil {
			return nil, fmt.Errorf("--tls-cert: %w", err)
		}
		cfg.Certificates = []tls.Certificate{pair}
	}
	if cfg.ServerName == "" {
		host, _, err := net.SplitHostPort(address)
		if err != nil {
			return nil, fmt.Errorf("--address %q is not host:port: %w", address, err)
		}
		cfg.ServerName = host
	}
	return cfg, nil
}

// ask opens an Admin of the target, calls do, and says what to try where the
// node is not there.
func (t *target) ask(ctx context.Context, do func(context.Context, *client.Admin) error) error {
	cfg, err := t.config()
	if err != nil {
		return err
	}
	admin, err := client.OpenAdmin(cfg)
	if err != nil {
		return &usageError{err}
	}
	defer admin.Close() //nolint:errcheck // only asked
	err = do(ctx, admin)
	if errors.Is(err, paging.ErrUnavailable) {
		err = fmt.Errorf("%w\nis a node running at %s? (kvtier serve; or name another one by --socket or --address)", err, cmp.Or(cfg.Socket, cfg.Address))
	}
	return err
}
