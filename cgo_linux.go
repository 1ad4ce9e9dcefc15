//go:build linux && cgo && !valkeyrdma_link

package valkeyrdma

// #cgo CFLAGS: -std=gnu11
// #cgo LDFLAGS: -ldl -lpthread
import "C"
