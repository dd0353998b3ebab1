package main

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/kvtier/kvtier/server"
	"github.com/kvtier/kvtier/tier/policy"
)

// Where a value came from, as --print-config shows it.
const (
	originDefault = "default"
	originFile    = "file"
	originEnv     = "env"
	originFlag    = "flag"
)

const envPrefix = "KVTIER_"

// otherEnv are variables with our prefix that are no settings of serve: those
// of the tools and of the tests.
var otherEnv = []string{"KVTIER_CONFIG", "KVTIER_ADDRESS", "KVTIER_TOKEN", "KVTIER_CA", "KVTIER_SABOTAGE", "KVTIER_TORTURE", "KVTIER_SEED", cudaLibraryEnv}

// injectedEnv are the variables that Kubernetes sets in every container when a
// service is called kvtier: they are not meant for us.
var injectedEnv = regexp.MustCompile(`^KVTIER_([A-Z0-9_]+_)?(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$`)

// loaded is a configuration together with the origin of each setting.
type loaded struct {
	nodeConfig
	origin map[string]string
	file   string
}

// loader gathers the sources of a configuration. Later sources win: defaults,
// file, environment, flags.
type loader struct {
	file  string   // configuration file; empty: none
	env   []string // as of os.Environ
	flags *pflag.FlagSet
}

// load reads every source and reports every problem of them at once as a
// usageError. It touches nothing but the file.
func (l loader) load() (*loaded, error) {
	c := &loaded{nodeConfig: defaultConfig(), origin: map[string]string{}, file: l.file}
	all := settings(&c.nodeConfig)
	for _, s := range all {
		c.origin[s.name] = originDefault
	}
	errs := slices.Concat(l.readFile(c, all), l.readEnv(c, all), l.readFlags(c, all))
	if len(errs) == 0 {
		errs = c.problems()
	}
	if len(errs) > 0 {
		return nil, &usageError{errors.Join(errs...)}
	}
	if c.origin["nvme"] != originDefault && c.NVMeBytes == 0 {
		if c.Bootstrap || c.Join != "" {
			return nil, usagef("nvme: 0 gives up the data directory, in which a node of a cluster keeps its part of the directory: give the disk tier a budget, 16MiB is enough")
		}
		c.Dir = "" // no disk tier was asked for
	}
	c.Origins = c.origin
	return c, nil
}

// problems lists everything in c that cannot work, each with its remedy.
func (c *loaded) problems() []error {
	var errs []error
	if !slices.Contains(logFormats, c.LogFormat) {
		errs = append(errs, fmt.Errorf("log-format: %q: want %s", c.LogFormat, strings.Join(logFormats, " or ")))
	}
	var level slog.Level
	if err := level.UnmarshalText([]byte(c.LogLevel)); err != nil {
		errs = append(errs, fmt.Errorf("log-level: %q: want debug, info, warn or error", c.LogLevel))
	}
	if !slices.Contains(policy.Names(), c.Policy) {
		errs = append(errs, fmt.Errorf("policy: %q: want one of %s", c.Policy, strings.Join(policy.Names(), ", ")))
	}
	if err := c.Validate(); err != nil {
		errs = append(errs, err)
	}
	return errs
}

var logFormats = []string{"text", "json"}

func (l loader) readFile(c *loaded, all []setting) []error {
	if l.file == "" {
		return nil
	}
	data, err := os.ReadFile(l.file)
	if err != nil {
		return []error{fmt.Errorf("configuration file: %w", err)}
	}
	return readYAML(c, all, l.file, data)
}

// readYAML reads the text of a configuration file.
func readYAML(c *loaded, all []setting, file string, data []byte) []error {
	var doc yaml.Node
	dec := yaml.NewDecoder(strings.NewReader(string(data)))
	if err := dec.Decode(&doc); err != nil {
		if errors.Is(err, io.EOF) {
			return nil
		}
		return []error{fmt.Errorf("%s: %w", file, err)}
	}
	if len(doc.Content) != 1 || doc.Content[0].Kind != yaml.MappingNode {
		return []error{fmt.Errorf("%s: want a list of \"name: value\" lines", file)}
	}
	if err := dec.Decode(&yaml.Node{}); !errors.Is(err, io.EOF) {
		return []error{fmt.Errorf("%s: more than one document", file)}
	}
	return readMapping(c, all, file, "", doc.Content[0])
}

// readMapping reads the pairs of one mapping; prefix is "" at the top, "tls." in
// a nested one.
func readMapping(c *loaded, all []setting, file, prefix string, mapping *yaml.Node) []error {
	var errs []error
	seen := map[string]bool{}
	for i := 0; i+1 < len(mapping.Content); i += 2 {
		key, value := mapping.Content[i], mapping.Content[i+1]
		name := prefix + key.Value
		where := fmt.Sprintf("%s:%d", file, key.Line)
		if seen[name] {
			errs = append(errs, fmt.Errorf("%s: %s is given twice", where, name))
			continue
		}
		seen[name] = true
		nested := slices.ContainsFunc(all, func(s setting) bool { return strings.HasPrefix(s.name, name+".") })
		if nested && value.Kind == yaml.MappingNode {
			errs = append(errs, readMapping(c, all, file, name+".", value)...)
		} else if err := readPair(c, all, name, value); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", where, err))
		}
	}
	return errs
}

func readPair(c *loaded, all []setting, key string, value *yaml.Node) error {
	if key == tenantsKey {
		c.origin[key] = originFile
		if err := decodeStrict(value, &c.Tenants); err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
		return nil
	}
	i := slices.IndexFunc(all, func(s setting) bool { return s.name == key })
	if i < 0 {
		return unknown(key, append(names(all), tenantsKey))
	}
	if value.Kind != yaml.ScalarNode {
		return fmt.Errorf("%s: want one value", key)
	}
	return assign(c, all[i], value.Value, originFile)
}

// decodeStrict decodes a node and refuses keys that the target does not have.
func decodeStrict(node *yaml.Node, target any) error {
	text, err := yaml.Marshal(node)
	if err != nil {
		return err
	}
	dec := yaml.NewDecoder(strings.NewReader(string(text)))
	dec.KnownFields(true)
	err = dec.Decode(target)
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

func (l loader) readEnv(c *loaded, all []setting) []error {
	var errs []error
	var known []string
	for _, s := range all {
		known = append(known, envName(s.name))
	}
	for _, entry := range l.env {
		name, value, _ := strings.Cut(entry, "=")
		if !strings.HasPrefix(name, envPrefix) || slices.Contains(otherEnv, name) || injectedEnv.MatchString(name) {
			continue
		}
		i := slices.Index(known, name)
		if i < 0 {
			errs = append(errs, fmt.Errorf("environment: %w", unknown(name, known)))
			continue
		}
		if err := assign(c, all[i], value, originEnv); err != nil {
			errs = append(errs, fmt.Errorf("environment %s: %w", name, err))
		}
	}
	return errs
}

func (l loader) readFlags(c *loaded, all []setting) []error {
	var errs []error
	if l.flags == nil {
		return nil
	}
	l.flags.Visit(func(f *pflag.Flag) {
		i := slices.IndexFunc(all, func(s setting) bool { return flagName(s.name) == f.Name })
		if i < 0 {
			return
		}
		if err := assign(c, all[i], f.Value.String(), originFlag); err != nil {
			errs = append(errs, fmt.Errorf("flag --%w", err))
		}
	})
	return errs
}

// bindFlags defines a flag for each setting. The flags hold text: precedence
// and checks are the loader's.
func bindFlags(flags *pflag.FlagSet) {
	defaults := defaultConfig()
	for _, s := range settings(&defaults) {
		text := show(s.field)
		if _, ok := s.field.(*bool); ok {
			flags.Bool(flagName(s.name), text == "true", s.usage)
			continue
		}
		flags.Var(&textValue{text: text, kind: kindOf(s.field)}, flagName(s.name), s.usage)
	}
}

type textValue struct{ text, kind string }

func (v *textValue) String() string     { return v.text }
func (v *textValue) Set(s string) error { v.text = s; return nil }
func (v *textValue) Type() string       { return v.kind }

func assign(c *loaded, s setting, text, origin string) error {
	if err := parse(s.field, text); err != nil {
		return fmt.Errorf("%s: %w", s.name, err)
	}
	c.origin[s.name] = origin
	return nil
}

// parse reads text into a field of the configuration.
func parse(field any, text string) error {
	var err error
	switch f := field.(type) {
	case *string:
		*f = text
	case *server.Size:
		err = f.Set(text)
	case *bool:
		*f, err = strconv.ParseBool(text)
		err = plain(err, text, "is neither true nor false")
	case *int:
		*f, err = strconv.Atoi(text)
		err = plain(err, text, "is no whole number")
	case **int:
		if text == "" {
			*f = nil
			return nil
		}
		*f = new(int)
		**f, err = strconv.Atoi(text)
		err = plain(err, text, "is no whole number")
	case *time.Duration:
		*f, err = time.ParseDuration(text)
		err = plain(err, text, "is no duration: write it like 10s, 1m30s or 250ms")
	default:
		panic(fmt.Sprintf("setting of type %T", field))
	}
	return err
}

func plain(err error, text, what string) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%q %s", text, what)
}

func show(field any) string {
	switch f := field.(type) {
	case *string:
		return *f
	case *server.Size:
		return f.String()
	case *time.Duration:
		return f.String()
	case *bool:
		return strconv.FormatBool(*f)
	case *int:
		return strconv.Itoa(*f)
	case **int:
		if *f == nil {
			return ""
		}
		return strconv.Itoa(**f)
	}
	panic(fmt.Sprintf("setting of type %T", field))
}

func kindOf(field any) string {
	switch field.(type) {
	case *server.Size:
		return "size"
	case *time.Duration:
		return "duration"
	case *int, **int:
		return "number"
	}
	return "string"
}

func envName(setting string) string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(flagName(setting), "-", "_"))
}

func flagName(setting string) string { return strings.ReplaceAll(setting, ".", "-") }

func names(all []setting) []string {
	out := make([]string, len(all))
	for i, s := range all {
		out[i] = s.name
	}
	return out
}

func unknown(key string, known []string) error {
	if near := nearest(key, known); near != "" {
		return fmt.Errorf("unknown setting %s: did you mean %s?", key, near)
	}
	return fmt.Errorf("unknown setting %s: kvtier serve --help lists them", key)
}
