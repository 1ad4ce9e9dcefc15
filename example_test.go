package valkeyrdma_test

import (
	"log"
	"net"

	"github.com/valkey-io/valkey-go"
	"github.com/valkeyrdma/valkeyrdma"
)

// Sentinels speak TCP only, and name the nodes by their TCP ports; these nodes have RDMA on port 6378.
func ExampleDialer_sentinel() {
	dialer := &valkeyrdma.Dialer{
		Route: func(dst string) (network, address string) {
			host, port, _ := net.SplitHostPort(dst)
			if port == "26379" {
				return "tcp", dst
			}
			return "rdma", net.JoinHostPort(host, "6378")
		},
		Fallback: func(dst string, err error) bool {
			log.Printf("%s is reached by TCP: %v", dst, err)
			return true
		},
	}
	client, err := valkey.NewClient(valkey.ClientOption{
		InitAddress: []string{"10.0.0.7:26379", "10.0.0.8:26379", "10.0.0.9:26379"},
		Sentinel:    valkey.SentinelOption{MasterSet: "mymaster"},
		DialCtxFn:   dialer.DialCtxFn,
	})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
}

// The cluster announces the TCP ports of its nodes; these have RDMA on port 6378.
func ExampleDialer_cluster() {
	dialer := &valkeyrdma.Dialer{
		Route: func(dst string) (network, address string) {
			host, _, _ := net.SplitHostPort(dst)
			return "rdma", net.JoinHostPort(host, "6378")
		},
	}
	client, err := valkey.NewClient(valkey.ClientOption{
		InitAddress: []string{"10.0.0.7:6379", "10.0.0.8:6379"},
		DialCtxFn:   dialer.DialCtxFn,
	})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
}
