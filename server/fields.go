package server

import (
	"fmt"
	"reflect"
	"strings"
)

// Field is one setting in force, for people.
type Field struct {
	Name   string // as in the configuration file
	Value  string // secrets are hidden
	Origin string // "default", "file", "env" or "flag"
}

// Fields lists the settings of c after defaults, in the order of Config.
func (c Config) Fields() []Field {
	c = c.WithDefaults()
	var fields []Field
	appendFields(&fields, "", reflect.ValueOf(c), c.Origins)
	return fields
}

func appendFields(fields *[]Field, prefix string, v reflect.Value, origins map[string]string) {
	for i := range v.NumField() {
		tag := v.Type().Field(i).Tag.Get("yaml")
		if tag == "-" {
			continue
		}
		name := prefix + tag
		if tls, ok := v.Field(i).Interface().(TLS); ok {
			appendFields(fields, name+".", reflect.ValueOf(tls), origins)
			continue
		}
		origin := origins[name]
		if origin == "" {
			origin = "default"
		}
		*fields = append(*fields, Field{Name: name, Value: fieldValue(v.Field(i)), Origin: origin})
	}
}

func fieldValue(v reflect.Value) string {
	switch x := v.Interface().(type) {
	case []Tenant:
		names := make([]string, len(x))
		for i, t := range x {
			names[i] = fmt.Sprintf("%s (%d uids, %d tokens)", t.Name, len(t.UIDs), len(t.Tokens))
		}
		return strings.Join(names, ", ")
	case *int:
		if x == nil {
			return ""
		}
		return fmt.Sprint(*x)
	}
	return fmt.Sprint(v.Interface())
}
