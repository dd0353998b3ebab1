package main

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
)

func newExplain(out *output) *cobra.Command {
	var at target
	var namespace string
	cmd := &cobra.Command{
		Use:   "explain BLOCK|FILE",
		Short: "Tell of blocks why they are hits, or are not",
		Long: `explain tells of each block why it is a hit, or is not: never stored, evicted (when,
and where), stored under a layout that differs (in which field), another tenant's, a
part missing, its owner unreachable, its claim outdated, or unknown.

The argument is the name of a block (64 hex digits; fewer if this node has it), or a
file with the tokens of a prompt: numbers with commas or white space between, or a
JSON array. Of tokens the names are made by the hash algorithm of the namespace,
which --namespace then has to name.`,
		Example: "  kvtier explain 1f0c4be2\n  kvtier explain --namespace 9b1d... prompt.json",
		Args:    oneArg("the name of a block, or a file with tokens"),
	}
	cmd.Flags().StringVar(&namespace, "namespace", "", "`id` of the namespace (64 hex digits); empty: the one that has the block")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		var req client.ExplainRequest
		if namespace != "" {
			id, err := hex.DecodeString(namespace)
			if err != nil || len(id) != len(req.Namespace) {
				return usagef("--namespace: %q is not %d hex digits", namespace, 2*len(req.Namespace))
			}
			req.Namespace = paging.NamespaceID(id)
		}
		tokens, isFile, err := readTokens(args[0])
		if err != nil {
			return err
		}
		if isFile && namespace == "" {
			return usagef("%s holds tokens: --namespace says how names are made of them", args[0])
		}
		req.Tokens = tokens
		return at.ask(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
			if !isFile {
				if err := nameBlock(ctx, a, args[0], &req); err != nil {
					return err
				}
			}
			x, err := a.Explain(ctx, req)
			if err != nil {
				return err
			}
			if out.json() {
				return out.value(x)
			}
			return printExplanation(out, x)
		})
	}
	at.bind(cmd)
	return cmd
}

// nameBlock fills the request with a block whose name begins so.
func nameBlock(ctx context.Context, a *client.Admin, name string, req *client.ExplainRequest) error {
	if full, err := hex.DecodeString(name); err == nil && len(full) == len(paging.BlockName{}) {
		req.Names = []paging.BlockName{paging.BlockName(full)}
		return nil
	}
	block, _, err := a.Block(ctx, name, false)
	if errors.Is(err, paging.ErrNotFound) {
		return fmt.Errorf("this node has no block whose name begins with %s: give all 64 digits: %w", name, err)
	} else if err != nil {
		return err
	}
	full, err := hex.DecodeString(block.Name)
	if err != nil || len(full) != len(paging.BlockName{}) {
		return fmt.Errorf("the node names a block %q: %w", block.Name, paging.ErrInvalid)
	}
	req.Names = []paging.BlockName{paging.BlockName(full)}
	if id, err := hex.DecodeString(block.Namespace); err == nil && len(id) == len(req.Namespace) && req.Namespace == (paging.NamespaceID{}) {
		req.Namespace = paging.NamespaceID(id)
	}
	return nil
}

// readTokens reads the tokens in a file; false: there is no such file.
func readTokens(path string) ([]uint32, bool, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, false, nil
	} else if err != nil {
		return nil, true, err
	}
	var tokens []uint32
	if json.Unmarshal(b, &tokens) == nil {
		return tokens, true, nil
	}
	for _, word := range strings.FieldsFunc(string(b), func(r rune) bool { return strings.ContainsRune(", \t\r\n", r) }) {
		t, err := strconv.ParseUint(word, 10, 32)
		if err != nil {
			return nil, true, usagef("%s: %q is no token: want numbers with commas or white space between, or a JSON array", path, word)
		}
		tokens = append(tokens, uint32(t))
	}
	return tokens, true, nil
}

func printExplanation(out *output, x *client.Explanation) error {
	fmt.Fprintf(out.w, "namespace %s, tenant %s, model %s: %d of %d blocks could be served\n\n", x.Namespace[:min(16, len(x.Namespace))], x.Tenant, x.Model, x.Usable, len(x.Blocks))
	var rows [][]string
	for i, b := range x.Blocks {
		rows = append(rows, []string{fmt.Sprint(i), b.Name[:min(16, len(b.Name))], strings.ReplaceAll(b.Verdict, "_", " "), b.Text})
	}
	return out.table([]string{"#", "block", "verdict", "why"}, rows)
}
