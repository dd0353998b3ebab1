// Package tier says what a medium that stores KV pages is, and composes media
// into one hierarchy.
package tier
