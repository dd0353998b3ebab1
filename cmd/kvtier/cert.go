package main

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/paging"
	"github.com/kvtier/kvtier/server/placement"
	"github.com/kvtier/kvtier/server/transport"
	"github.com/kvtier/kvtier/server/trust"
)

// Names in the directory of an authority.
const (
	caFile    = "ca.pem"
	caKeyFile = "ca-key.pem"
)

func newCert(out *output) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cert",
		Short: "Make the certificates and the gossip key of a cluster",
		Long: `cert makes a development authority and the certificates that it signs. Whoever
has an authority of his own makes certificates with the same URI: a node's is
kvtier://CLUSTER/node/NAME, a client's kvtier://CLUSTER/client/NAME?role=ROLE&tenant=TENANT.

  kvtier cert ca --dir certs --cluster prod
  kvtier cert issue --dir certs --node a --host a.example.org --host 10.0.0.1
  kvtier cert issue --dir certs --client vllm-1 --role engine --tenant chat
  kvtier cert gossip-key --file certs/gossip.key

Files are for their owner only, and none is replaced without --force. A node takes
new files while it runs. ca-key.pem signs everything: keep it off the nodes.`,
		Args: noArgs,
		RunE: showHelp,
	}
	cmd.AddCommand(newCertCA(out), newCertIssue(out), newCertGossipKey(out))
	return cmd
}

// certOut is what a command made.
type certOut struct {
	Identity    string    `json:"identity"`
	Cluster     string    `json:"cluster"`
	Certificate string    `json:"certificate"`
	Key         string    `json:"key"`
	CA          string    `json:"ca,omitempty"`
	Hosts       []string  `json:"hosts,omitempty"`
	NotAfter    time.Time `json:"not_after"`
}

func (o *output) certificate(c *certOut) error {
	if o.json() {
		return o.value(c)
	}
	rows := [][]string{{"identity", c.Identity}, {"certificate", c.Certificate}, {"key", c.Key}}
	if c.CA != "" {
		rows = append(rows, []string{"authority", c.CA})
	}
	if len(c.Hosts) > 0 {
		rows = append(rows, []string{"hosts", strings.Join(c.Hosts, ", ")})
	}
	return o.table(nil, append(rows, []string{"valid until", c.NotAfter.Local().Format(time.RFC1123)}))
}

// certError makes mistakes of the caller usage errors, and says how to go on
// where a file exists.
func certError(err error) error {
	switch {
	case errors.Is(err, fs.ErrExist):
		return fmt.Errorf("%w: --force replaces it", err)
	case errors.Is(err, paging.ErrInvalid):
		return &usageError{err}
	}
	return err
}

func newCertCA(out *output) *cobra.Command {
	var dir, cluster string
	var life time.Duration
	var force bool
	cmd := &cobra.Command{
		Use:   "ca",
		Short: "Make the authority of a cluster",
		Args:  noArgs,
		RunE: func(*cobra.Command, []string) error {
			if life < time.Hour {
				return usagef("--valid-for: %v: want at least an hour", life)
			}
			_, pair, err := trust.NewAuthority(cluster, time.Now(), life)
			if err == nil {
				err = os.MkdirAll(dir, 0o700)
			}
			made := &certOut{Cluster: cluster, Certificate: filepath.Join(dir, caFile), Key: filepath.Join(dir, caKeyFile)}
			if err == nil {
				err = trust.WriteFiles([]trust.File{{Path: made.Key, Bytes: pair.Key}, {Path: made.Certificate, Bytes: pair.Cert}}, force)
			}
			if err != nil {
				return certError(err)
			}
			made.Identity, made.NotAfter = "authority of "+cluster, pair.Leaf.NotAfter
			return out.certificate(made)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&dir, "dir", "certs", "`directory` to write ca.pem and ca-key.pem into")
	flags.StringVar(&cluster, "cluster", "kvtier", "`name` of the cluster, which every certificate carries")
	flags.DurationVar(&life, "valid-for", trust.AuthorityLife, "time until it expires")
	flags.BoolVar(&force, "force", false, "replace existing files: certificates of the old authority are good for nothing then")
	return cmd
}

func newCertIssue(out *output) *cobra.Command {
	var dir, to, id string
	var node, client string
	var force bool
	r := trust.Request{Life: trust.CertificateLife}
	cmd := &cobra.Command{
		Use:   "issue",
		Short: "Make the certificate of a node or of a client",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if (node == "") == (client == "") {
				return usagef("name one of --node and --client")
			}
			r.Identity.Kind, r.Identity.Name = trust.Client, client
			if node != "" {
				r.Identity.Kind, r.Identity.Name = trust.Node, node
			} else if r.Identity.Role == "" {
				r.Identity.Role = trust.RoleEngine
			}
			if id != "" {
				raw, err := hex.DecodeString(id)
				if err != nil || len(raw) != len(placement.NodeID{}) || node == "" {
					return usagef("--id: want the 32 hex digits of a node's id, with --node")
				}
				r.Names = []string{transport.NodeName(placement.NodeID(raw))}
			}
			made, err := issue(dir, to, force, &r)
			if err != nil {
				return certError(err)
			}
			return out.certificate(made)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&dir, "dir", "certs", "`directory` of the authority")
	flags.StringVar(&to, "to", "", "`directory` to write into; default: that of the authority")
	flags.StringVar(&node, "node", "", "`name` of the node that is to have it")
	flags.StringVar(&client, "client", "", "`name` of the client that is to have it")
	flags.StringVar(&id, "id", "", "only the node with this `id` may use it, as status shows it; default: any node of the cluster")
	flags.StringArrayVar(&r.Hosts, "host", nil, "DNS `name` or IP address that clients reach the node by; may be repeated")
	flags.StringVar(&r.Identity.Role, "role", "", "`role` of a client: engine, operator or read-only; default: engine")
	flags.StringVar(&r.Identity.Tenant, "tenant", "", "`tenant` of a client")
	flags.DurationVar(&r.Life, "valid-for", r.Life, "time until it expires, at most until the authority does")
	flags.BoolVar(&force, "force", false, "replace existing files")
	return cmd
}

// issue signs with the authority in dir and writes KIND-NAME.pem and
// KIND-NAME-key.pem.
func issue(dir, to string, force bool, r *trust.Request) (*certOut, error) {
	made := &certOut{CA: filepath.Join(dir, caFile), Hosts: r.Hosts}
	authority, err := trust.ReadAuthority(made.CA, filepath.Join(dir, caKeyFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: make an authority with \"kvtier cert ca --dir %s\"", err, dir)
	}
	if err != nil {
		return nil, err
	}
	pair, err := authority.Issue(*r, time.Now())
	if err != nil {
		return nil, err
	}
	if to == "" {
		to = dir
	}
	if err := os.MkdirAll(to, 0o700); err != nil {
		return nil, err
	}
	base := filepath.Join(to, string(r.Identity.Kind)+"-"+r.Identity.Name)
	made.Certificate, made.Key, made.Cluster, made.NotAfter = base+".pem", base+"-key.pem", authority.Cluster(), pair.Leaf.NotAfter
	made.Identity = pair.Leaf.URIs[0].String()
	return made, trust.WriteFiles([]trust.File{{Path: made.Key, Bytes: pair.Key}, {Path: made.Certificate, Bytes: pair.Cert}}, force)
}

func newCertGossipKey(out *output) *cobra.Command {
	var file string
	var force bool
	cmd := &cobra.Command{
		Use:   "gossip-key",
		Short: "Make the key that gossip is encrypted with, the same on all nodes",
		Args:  noArgs,
		RunE: func(*cobra.Command, []string) error {
			key := trust.NewGossipKey()
			if file == "" {
				if out.json() {
					return out.value(map[string]string{"gossip_key": key})
				}
				return out.table(nil, [][]string{{key}})
			}
			if err := trust.WriteFiles([]trust.File{{Path: file, Bytes: []byte(key + "\n")}}, force); err != nil {
				return certError(err)
			}
			if out.json() {
				return out.value(map[string]string{"file": file})
			}
			return out.table(nil, [][]string{{"written", file}})
		},
	}
	cmd.Flags().StringVar(&file, "file", "", "`file` to write it to; default: print it")
	cmd.Flags().BoolVar(&force, "force", false, "replace an existing file")
	return cmd
}
