# "make help" lists what there is. Everything works on a fresh Debian or Ubuntu machine without RDMA hardware; scripts/lab
# says what it installs, and what it would need on other systems.

.PHONY: help demo test test-run test-race test-asan fuzz guards soak bench bench-quick conformance lab lint fmt clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' $(MAKEFILE_LIST) | expand -t 12

demo: ## watch valkey-go talk to a real Valkey over RDMA
	@scripts/lab --setup
	@mkdir -p build
	@go build -o build/demo ./examples/demo
	@scripts/lab build/demo

test: ## all tests, the integration tests in the laboratory among them
	@scripts/test

test-run: ## one test of the laboratory: make test-run RUN=TestPing
	@scripts/test run '$(RUN)'

test-race: ## the laboratory's tests, but internal/e2e, with the race detector and checkptr
	@scripts/test race

test-asan: ## the same with the address sanitizer, leaks included
	@scripts/test asan

fuzz: ## fuzz the protocol, a minute each: make fuzz FUZZTIME=10m
	@scripts/fuzz $(FUZZTIME)

guards: ## take out the guard against each hazard, and see its test fail
	@scripts/guards

soak: ## everything mixed while servers are killed and stopped, ten minutes: make soak SOAK=30m
	@scripts/soak $(SOAK)

bench: ## compare with TCP, with Valkey's C client and with the limits of the device: some 30 minutes
	@scripts/bench

bench-quick: ## only what the targets are about, in under 3 minutes
	@scripts/bench -quick

conformance: ## valkey-go's own test suites, and rueidis', over TCP and RDMA: some four hours without KVM
	@scripts/conformance

lab: ## install, fetch and build the laboratory: RDMA and a Valkey with it (scripts/lab --help)
	@scripts/lab --setup

lint: ## gofmt, go vet, C warnings, shellcheck
	@scripts/lint

fmt: ## format Go and C
	@gofmt -w .
	@clang-format -i *.[ch] internal/*/*.[ch] testdata/*.c

clean: ## remove what was built here; the laboratory's cache stays (~/.cache/valkeyrdma)
	@rm -rf build
