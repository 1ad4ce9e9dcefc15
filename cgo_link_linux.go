//go:build linux && cgo && valkeyrdma_link

package valkeyrdma

// #cgo CFLAGS: -std=gnu11 -DVALKEYRDMA_LINK
// #cgo LDFLAGS: -lrdmacm -libverbs -lpthread
import "C"
