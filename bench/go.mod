module github.com/valkeyrdma/valkeyrdma/bench

go 1.25.0

require (
	github.com/valkey-io/valkey-go v1.0.79
	github.com/valkeyrdma/valkeyrdma v0.0.0
)

require golang.org/x/sys v0.47.0 // indirect

replace github.com/valkeyrdma/valkeyrdma => ../
