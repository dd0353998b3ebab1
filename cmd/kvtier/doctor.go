package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
)

func newDoctor(out *output) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Tell what on this machine would hold a node back, and how to mend it",
		Long: `doctor looks at the machine with the configuration that serve would use (same
flags, environment and file): memory and cgroup limits, huge pages, locked
memory, open files, directories, disk space and speed, O_DIRECT, kernel seals, GPUs.
Each check says ok, warn (works, but slower or with less room) or fail, and how
to mend it. It exits 1 if a check failed.`,
		Args: noArgs,
	}
	file := configFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, err := loader{file: file(), env: os.Environ(), flags: cmd.Flags()}.load()
		if err != nil {
			return err
		}
		effective := c.withDefaults()
		return printFindings(out, examine(cmd.Context(), thisHost(), &effective, false))
	}
	return cmd
}

func printFindings(out *output, found []finding) error {
	failed := 0
	var rows [][]string
	for _, f := range found {
		if f.Verdict == verdictFail {
			failed++
		}
		rows = append(rows, []string{f.Verdict, f.Check, f.Found})
		if f.Mend != "" {
			rows = append(rows, []string{"", "", "mend: " + f.Mend})
		}
	}
	var err error
	if out.json() {
		err = out.value(map[string][]finding{"checks": found})
	} else {
		err = out.table(nil, rows)
	}
	if err == nil && failed > 0 {
		err = fmt.Errorf("%d of %d checks failed", failed, len(found))
	}
	return err
}

// configFlags gives cmd the settings as flags, and --config.
func configFlags(cmd *cobra.Command) (file func() string) {
	bindFlags(cmd.Flags())
	name := cmd.Flags().String("config", "", "configuration `file` (YAML); also KVTIER_CONFIG")
	return func() string {
		if *name == "" {
			return os.Getenv("KVTIER_CONFIG")
		}
		return *name
	}
}
