package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/kvtier/kvtier/bench"
)

// format is the value of -o.
type format string

func (f *format) String() string {
	if *f == "" {
		return "table"
	}
	return string(*f)
}

func (f *format) Set(s string) error {
	switch s {
	case "table", "json":
		*f = format(s)
		return nil
	}
	return fmt.Errorf("%q is neither table nor json", s)
}

func (f *format) Type() string { return "string" }

// output prints answers: a table for people, or one JSON value.
type output struct {
	w      io.Writer
	format format
}

func (o *output) json() bool { return o.format == "json" }

// value prints v as JSON.
func (o *output) value(v any) error {
	enc := json.NewEncoder(o.w)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// report prints what a workload found and returns what is wrong with it.
func (o *output) report(r bench.Report) error {
	write := func() error { return bench.WriteTable(o.w, r) }
	if o.json() {
		write = func() error { return o.value(r) }
	}
	if err := write(); err != nil {
		return err
	}
	return r.Err()
}

// table prints rows under a header.
func (o *output) table(header []string, rows [][]string) error {
	tw := tabwriter.NewWriter(o.w, 0, 8, 2, ' ', 0)
	if len(header) > 0 {
		fmt.Fprintln(tw, strings.ToUpper(strings.Join(header, "\t")))
	}
	for _, row := range rows {
		fmt.Fprintln(tw, strings.TrimRight(strings.Join(row, "\t"), "\t"))
	}
	return tw.Flush()
}
