#!/bin/sh
# Makes what `viv bench` compares with: runsc, built from the gVisor module
# that viv itself is built with, into bin/; podman and bubblewrap from Debian,
# where they are missing. Takes no arguments.
set -eu
cd "$(dirname "$0")/.."
GO=${GO:-go}

version=$("$GO" list -m -f '{{.Version}}' gvisor.dev/gvisor)
mkdir -p bin
echo "runsc $version"
CGO_ENABLED=0 "$GO" build -trimpath \
	-ldflags "-s -w -X gvisor.dev/gvisor/runsc/version.version=$version" \
	-o bin/runsc gvisor.dev/gvisor/runsc

missing=
command -v podman >/dev/null 2>&1 || missing="$missing podman"
command -v bwrap >/dev/null 2>&1 || missing="$missing bubblewrap"
[ -n "$missing" ] || exit 0
if ! command -v apt-get >/dev/null 2>&1 || [ "$(id -u)" != 0 ]; then
	echo "not installed, and left out of the comparison:$missing" >&2
	echo "  as root on Debian or Ubuntu: apt-get install$missing" >&2
	exit 0
fi
# unquoted: a list of names of ours
DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $missing
