#!/bin/sh
# Checks what this host needs to build, run and test Vivarium, says what is
# missing and how to get it, and installs what Debian and Ubuntu package.
#
#   sh quickstart/prepare.sh [PACKAGE...]
#
# With no PACKAGE it is what `make quickstart` needs. Asks nothing. Changes
# nothing where nothing is missing.
set -eu
cd "$(dirname "$0")/.."

say() { printf '%s\n' "$*"; }
die() {
	printf 'missing: %s\n' "$1" >&2
	shift
	for line in "$@"; do printf '  %s\n' "$line" >&2; done
	exit 1
}

[ "$(uname -s)" = Linux ] || die "Linux" "Vivarium starts sandboxes with Linux namespaces and control groups."
case $(uname -m) in
x86_64 | aarch64) ;;
*) die "a processor that gVisor runs on" "x86_64 or aarch64; this is $(uname -m)" ;;
esac

# --- Go: not from the distribution, whose own is older than go.mod asks for
need=$(sed -n 's/^go //p' go.mod)
case $(uname -m) in aarch64) arch=arm64 ;; *) arch=amd64 ;; esac
how_go() {
	die "$1" \
		"Get Go $need or newer from https://go.dev/dl/ (go$need.linux-$arch.tar.gz), then:" \
		"  sudo rm -rf /usr/local/go && sudo tar -C /usr/local -xzf go$need.linux-$arch.tar.gz" \
		"  export PATH=\$PATH:/usr/local/go/bin"
}
GO=${GO:-go}
command -v "$GO" >/dev/null 2>&1 || GO=/usr/local/go/bin/go
command -v "$GO" >/dev/null 2>&1 || how_go "Go"
# In this tree a Go from 1.21 on fetches the version that go.mod names, unless
# told not to; one that cannot says so here.
have=$("$GO" env GOVERSION 2>/dev/null) || how_go "Go $need ($("$GO" version 2>/dev/null || echo 'the one here does not run'))"
if ! printf '%s\n%s\n' "go$need" "$have" | sort -V -C; then
	how_go "Go $need (this is $have)"
fi
say "ok  $have"

# --- root
if [ "$(id -u)" = 0 ]; then
	sudo=
	say "ok  root"
elif command -v sudo >/dev/null 2>&1; then
	sudo=sudo
	say "ok  sudo"
else
	die "root" "The daemon makes namespaces and control groups. Run this as root, or install sudo."
fi

# --- disk
room() { # directory, GiB
	free=$(df -Pk "$1" | awk 'NR == 2 { print int($4 / 1048576) }')
	[ "$free" -ge "$2" ] || die "room on the disk of $1" "$2 GiB are needed, $free are free"
}
room . 1
room "${HOME:-/}" 4 # Go keeps modules and what it has built there
room /tmp 3         # images of the daemon that quickstart and tests start
say "ok  disk"

# --- packages
[ $# -gt 0 ] || set -- ca-certificates curl git mmdebstrap
missing=
for p in "$@"; do
	[ "$(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null)" = installed ] || missing="$missing $p"
done
if [ -z "$missing" ]; then
	say "ok  packages: $*"
	exit 0
fi
command -v apt-get >/dev/null 2>&1 || die "$missing" "This host has no apt-get: install what these Debian packages hold with its own tools."
say "installing:$missing"
apt() { $sudo env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 "$@" </dev/null; }
for try in 1 2 3; do
	# a repository that is down must not stop the others
	apt update || say "apt-get update had errors"
	# $missing is a list of package names
	if apt install -y --no-install-recommends $missing; then
		say "ok  packages: $*"
		exit 0
	fi
	[ "$try" = 3 ] || sleep $((try * 10))
done
die "$missing" "apt-get could not install them; its own words are above"
