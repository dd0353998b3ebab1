// Package server is a kvtier node.
package server
