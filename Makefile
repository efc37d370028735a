# The build of Vivarium. `make quickstart` and `make test` are all that a
# newcomer needs; the README says what they do.

# /usr/local/go/bin is where Go's own instructions put it
GO        ?= $(or $(shell command -v go 2>/dev/null),/usr/local/go/bin/go)
GVISOR     = $(shell $(GO) list -m -f '{{.Version}}' gvisor.dev/gvisor)
VERSION   ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
# without our own version: the sentry and the guest stay the same over commits
# that do not touch them
GVLDFLAGS  = -s -w -X gvisor.dev/gvisor/runsc/version.version=$(GVISOR)
LDFLAGS    = $(GVLDFLAGS) -X vivarium/version.version=$(VERSION)
# -buildvcs would put the commit into the sentry and the guest, too
GOBUILD    = CGO_ENABLED=0 $(GO) build -trimpath -buildvcs=false

# the daemon and its tests need root; the compiler does not. sudo sets a PATH and
# a home of its own.
SUDO      := $(if $(filter 0,$(shell id -u)),,sudo env PATH="$(PATH):/usr/sbin:/sbin")
ASROOT     = $(if $(SUDO),-exec 'sudo env PATH=$(PATH):$(dir $(GO)):/usr/sbin:/sbin HOME=$(HOME) CGO_ENABLED=0')

.PHONY: build assets quickstart test vet lint bench proto install clean help
build: bin/viv

# what viv carries inside; go decides what has to be built again
assets:
	@mkdir -p bin
	$(GOBUILD) -ldflags '$(GVLDFLAGS)' -o bin/viv-sentry ./cmd/viv-sentry
	$(GOBUILD) -ldflags '$(GVLDFLAGS)' -o bin/viv-start ./cmd/viv-start
	$(GOBUILD) -ldflags '$(GVLDFLAGS)' -o bin/viv-guest ./cmd/viv-guest
	@for p in viv-sentry viv-start viv-guest; do \
		if ! [ assets/bin/$$p.zst -nt bin/$$p ]; then $(GO) run ./assets/pack bin/$$p assets/bin/$$p.zst; fi; done

.PHONY: bin/viv
bin/viv: assets
	$(GOBUILD) -ldflags '$(LDFLAGS)' -o bin/viv ./cmd/viv

# The main job from nothing. ARGS="--keep" leaves the daemon running; see
# quickstart/run.sh for the rest.
quickstart:
	@GO="$(GO)" sh quickstart/prepare.sh
	@$(MAKE) --no-print-directory build
	@$(SUDO) sh quickstart/run.sh $(ARGS)

# All tests. Each test binary runs as root; PKG=./guest/... is a part of them.
PKG ?= ./...
test:
	@GO="$(GO)" sh quickstart/prepare.sh busybox-static ca-certificates git
	@$(MAKE) --no-print-directory build vet
	CGO_ENABLED=0 $(GO) test -p 2 -timeout 20m $(ASROOT) $(PKG)

vet:
	CGO_ENABLED=0 $(GO) vet ./...

# staticcheck is pinned in go.mod as a tool
lint: assets vet
	CGO_ENABLED=0 $(GO) tool staticcheck ./...

# builds what the figures are compared with, then measures; minutes
bench: build
	GO="$(GO)" $(SUDO) sh bench/peers.sh
	$(SUDO) sh bench/run.sh $(ARGS)

# api/ from its .proto; needs Debian's protobuf-compiler, the plugins are tools
# pinned in go.mod
proto:
	@GO="$(GO)" sh quickstart/prepare.sh protobuf-compiler
	@mkdir -p bin/proto
	$(GO) build -o bin/proto/ google.golang.org/protobuf/cmd/protoc-gen-go connectrpc.com/connect/cmd/protoc-gen-connect-go
	PATH="$(CURDIR)/bin/proto:$$PATH" protoc -I api \
		--go_out=. --go_opt=module=vivarium \
		--connect-go_out=. --connect-go_opt=module=vivarium \
		api/vivarium/v1/vivarium.proto api/vivarium/v1/network.proto

# the program and its systemd unit; docs/operations.md says what is next
DESTDIR ?=
install:
	install -D -m 0755 bin/viv '$(DESTDIR)/usr/local/bin/viv'
	install -D -m 0644 dist/vivarium.service '$(DESTDIR)/etc/systemd/system/vivarium.service'

clean:
	rm -rf bin assets/bin/*.zst

help:
	@echo 'make quickstart   install what is missing, build, and do the main job'
	@echo 'make test         build, go vet, all tests'
	@echo 'make build        bin/viv'
	@echo 'make bench        measure, beside runsc, podman and bubblewrap'
	@echo 'make lint         go vet and staticcheck'
	@echo 'make proto        generate api/ again'
	@echo 'make install      /usr/local/bin/viv and the systemd unit'
	@echo 'make clean        remove what was built'
