// Command consumer is the program of a user who has vendored the library. scripts/test puts it into a module of its own
// outside of this one, vendors, builds, and runs it in the laboratory.
package main

import (
	"context"
	"fmt"
	"net"
	"os"

	"github.com/valkey-io/valkey-go"
	"github.com/valkeyrdma/valkeyrdma"
)

func main() {
	var remote net.Addr
	dialer := &valkeyrdma.Dialer{ReceiveWindow: 256 << 10}
	client, err := valkey.NewClient(valkey.ClientOption{
		InitAddress: os.Args[1:],
		DialCtxFn:   dialer.DialCtxFn,
		AuthCredentialsFn: func(ctx valkey.AuthCredentialsContext) (valkey.AuthCredentials, error) {
			remote = ctx.Address
			return valkey.AuthCredentials{}, nil
		},
	})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	defer client.Close()
	pong, err := client.Do(context.Background(), client.B().Ping().Build()).ToString()
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Printf("%s by %s from %s\n", pong, remote.Network(), remote)
}
