package main

import (
	"context"
	"encoding/hex"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvtier/kvtier/bench"
	"github.com/kvtier/kvtier/client"
	"github.com/kvtier/kvtier/paging"
)

func newBlocks(out *output) *cobra.Command {
	var at target
	cmd := &cobra.Command{
		Use:   "blocks",
		Short: "List and inspect the blocks of a node",
		Args:  noArgs,
		RunE:  showHelp,
	}
	at.bind(cmd)
	cmd.AddCommand(newBlocksList(out, &at), newBlocksInspect(out, &at))
	return cmd
}

// listed is the answer of "blocks list".
type listed struct {
	Blocks []client.BlockInfo `json:"blocks"`
	More   bool               `json:"more"` // there are more than were asked for
}

func newBlocksList(out *output, at *target) *cobra.Command {
	var namespace, tierName string
	var most int
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List blocks in order of namespace and name",
		Args:  noArgs,
	}
	cmd.Flags().StringVar(&namespace, "namespace", "", "only blocks of this namespace `id` (64 hex digits)")
	cmd.Flags().StringVar(&tierName, "tier", "", "only blocks in this `tier`: hbm, ram or nvme")
	cmd.Flags().IntVarP(&most, "limit", "n", 100, "at most so many; 0: all")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		req, err := blocksRequest(namespace, tierName, most)
		if err != nil {
			return err
		}
		return at.ask(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
			all, err := listBlocks(ctx, a, req, most)
			if err != nil {
				return err
			}
			if out.json() {
				return out.value(all)
			}
			return printBlocks(out, all)
		})
	}
	return cmd
}

func blocksRequest(namespace, tierName string, most int) (client.BlocksRequest, error) {
	var req client.BlocksRequest
	if namespace != "" {
		id, err := hex.DecodeString(namespace)
		if err != nil || len(id) != len(req.Namespace) {
			return req, usagef("--namespace: %q is not %d hex digits", namespace, 2*len(req.Namespace))
		}
		req.Namespace = paging.NamespaceID(id)
	}
	switch tierName {
	case "":
	case "hbm":
		req.Tier = client.TierHBM
	case "ram":
		req.Tier = client.TierRAM
	case "nvme":
		req.Tier = client.TierNVMe
	default:
		return req, usagef("--tier: %q is none of hbm, ram, nvme", tierName)
	}
	if most < 0 {
		return req, usagef("--limit: %d is negative", most)
	}
	return req, nil
}

// pageOfBlocks is how many blocks are asked for in one call.
const pageOfBlocks = 1000

func listBlocks(ctx context.Context, a *client.Admin, req client.BlocksRequest, most int) (listed, error) {
	all := listed{Blocks: []client.BlockInfo{}}
	for {
		req.Most = pageOfBlocks
		if most > 0 {
			req.Most = min(pageOfBlocks, most-len(all.Blocks))
		}
		blocks, next, err := a.Blocks(ctx, req)
		if err != nil {
			return all, err
		}
		all.Blocks = append(all.Blocks, blocks...)
		if next == "" {
			return all, nil
		}
		if most > 0 && len(all.Blocks) >= most {
			all.More = true
			return all, nil
		}
		req.After = next
	}
}

func printBlocks(out *output, all listed) error {
	var rows [][]string
	for _, b := range all.Blocks {
		rows = append(rows, []string{b.Name[:min(16, len(b.Name))], b.Tenant, b.Model, tierNames(b.Tiers), fmt.Sprint(b.Position),
			bench.FormatBytes(int64(b.Bytes)), fmt.Sprint(b.Hits), fmt.Sprint(b.Priority), fmt.Sprint(b.Leases), seconds(b.IdleS)}) //nolint:gosec // bytes of a block
	}
	err := out.table(strings.Fields("block tenant model tiers position bytes hits priority leases idle"), rows)
	if all.More && err == nil {
		_, err = fmt.Fprintln(out.w, "there are more: --limit 0 lists all")
	}
	return err
}

func tierNames(tiers []client.Tier) string {
	var names []string
	for _, t := range tiers {
		names = append(names, t.String())
	}
	return strings.Join(names, ",")
}

// inspected is the answer of "blocks inspect".
type inspected struct {
	client.BlockInfo
	Pages []client.PageInfo `json:"pages"`
}

func newBlocksInspect(out *output, at *target) *cobra.Command {
	var verify bool
	cmd := &cobra.Command{
		Use:   "inspect NAME",
		Short: "Tell all about one block; 4 digits of its name are enough if they are its own",
		Args:  oneArg("the name of a block"),
	}
	cmd.Flags().BoolVar(&verify, "verify", false, "read the stored copies and compare their checksums; exits 1 if one is wrong")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return at.ask(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
			block, pages, err := a.Block(ctx, args[0], verify)
			if err != nil {
				return err
			}
			if out.json() {
				err = out.value(inspected{block, pages})
			} else {
				err = printBlock(out, &block, pages)
			}
			if err != nil {
				return err
			}
			return verdict(pages)
		})
	}
	return cmd
}

// verdict is an error if a page that was verified is not what it shall be.
func verdict(pages []client.PageInfo) error {
	bad := 0
	for _, p := range pages {
		if p.Verdict != "" && p.Verdict != verdictOK {
			bad++
		}
	}
	if bad > 0 {
		return fmt.Errorf("%d of %d pages are wrong: %w", bad, len(pages), paging.ErrCorrupt)
	}
	return nil
}

func printBlock(out *output, b *client.BlockInfo, pages []client.PageInfo) error {
	err := out.table(nil, [][]string{
		{"name", b.Name},
		{"namespace", b.Namespace},
		{"tenant", b.Tenant},
		{"model", b.Model},
		{"tiers", tierNames(b.Tiers)},
		{"position", fmt.Sprintf("block %d of its chain", b.Position)},
		{"hits", fmt.Sprint(b.Hits)},
		{"leases", fmt.Sprint(b.Leases)},
		{"idle", seconds(b.IdleS)},
		{"retention", fmt.Sprintf("priority %d, %s left", b.Priority, seconds(b.RetainedS))},
	})
	if err != nil {
		return err
	}
	fmt.Fprintln(out.w)
	var rows [][]string
	for _, p := range pages {
		rows = append(rows, []string{fmt.Sprint(p.Part), p.PartName, p.Tier.String(), bench.FormatBytes(int64(p.Bytes)), //nolint:gosec // bytes of a page
			p.Checksum, p.Place, p.Verdict})
	}
	return out.table(strings.Fields("part name tier bytes checksum place verdict"), rows)
}
