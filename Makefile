# The build of Vivarium. `make quickstart` and `make test` are all that a
# newcomer needs; the README says what they do.

GO        ?= go
GVISOR    := $(shell $(GO) list -m -f '{{.Version}}' gvisor.dev/gvisor)
VERSION   ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
# without our own version: the sentry and the guest stay the same over commits
# that do not touch them
GVLDFLAGS := -s -w -X gvisor.dev/gvisor/runsc/version.version=$(GVISOR)
LDFLAGS   := $(GVLDFLAGS) -X vivarium/version.version=$(VERSION)
GOBUILD   := CGO_ENABLED=0 $(GO) build -trimpath

.PHONY: build assets
build: bin/viv

# what viv carries inside; go decides what has to be built again
assets:
	@mkdir -p bin
	$(GOBUILD) -ldflags '$(GVLDFLAGS)' -o bin/viv-sentry ./cmd/viv-sentry
	$(GOBUILD) -ldflags '$(GVLDFLAGS)' -o bin/viv-guest ./cmd/viv-guest
	@for p in viv-sentry viv-guest; do \
		if ! [ assets/bin/$$p.zst -nt bin/$$p ]; then $(GO) run ./assets/pack bin/$$p assets/bin/$$p.zst; fi; done

.PHONY: bin/viv
bin/viv: assets
	$(GOBUILD) -ldflags '$(LDFLAGS)' -o bin/viv ./cmd/viv
