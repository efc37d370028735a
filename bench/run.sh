#!/bin/sh
# Measures everything that is promised, on a daemon of its own in a temporary
# data directory, and prints goals beside figures. Leaves nothing but the
# results: one JSON file per bench in bench/results (or the directory after -o).
#
#   bench/run.sh [-q] [-t ROOTFS.tar] [-o DIRECTORY] [-p PORT] [-b VIV]
#
# -q  fewer runs and fewer sandboxes, to see that it works
# -t  root filesystem to use; without it a Debian base image is made
# -b  program to measure; peers are looked for beside it, then in PATH
set -eu
cd "$(dirname "$0")/.."

quick= tar= out=bench/results port=7879 viv=bin/viv
while getopts qt:o:p:b: opt; do
	case $opt in
	q) quick=1 ;;
	t) tar=$OPTARG ;;
	o) out=$OPTARG ;;
	p) port=$OPTARG ;;
	b) viv=$OPTARG ;;
	*) echo "usage: bench/run.sh [-q] [-t ROOTFS.tar] [-o DIRECTORY] [-p PORT] [-b VIV]" >&2; exit 2 ;;
	esac
done
[ "$(id -u)" = 0 ] || { echo "bench/run.sh: run it as root" >&2; exit 1; }
viv=$(realpath "$viv")
[ -x "$viv" ] || { echo "bench/run.sh: there is no $viv: make build" >&2; exit 1; }
mkdir -p "$out"

dir=$(mktemp -d /tmp/viv-bench.XXXXXX)
chmod 711 "$dir"
data=$dir/data
pid=
stop() {
	[ -n "$pid" ] || return 0
	kill "$pid" 2>/dev/null || true
	wait "$pid" 2>/dev/null || true
	pid=
}
cleanup() {
	if [ -n "$pid" ]; then
		# a bench removes its own; this is for one that was killed
		"$viv" ps --quiet 2>/dev/null | while read -r id; do
			"$viv" rm --force "$id" >/dev/null 2>&1 || true
		done
	fi
	stop
	rm -rf "$dir"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

VIV_SERVER=http://127.0.0.1:$port
VIV_DATA_DIR=$data
export VIV_SERVER VIV_DATA_DIR
# start ARGUMENT...: in a session of its own: a Ctrl-C is for the bench, which then
# needs the daemon to remove what it made
start() {
	setsid "$viv" serve --data-dir "$data" --listen "127.0.0.1:$port" --log-level warn "$@" 2>"$dir/serve.log" &
	pid=$!
	n=0
	until [ -s "$data/token" ] && VIV_TOKEN=$(cat "$data/token") "$viv" ps >/dev/null 2>&1; do
		n=$((n + 1))
		if [ $n -gt 100 ] || ! kill -0 "$pid" 2>/dev/null; then
			cat "$dir/serve.log" >&2
			exit 1
		fi
		sleep 0.1
	done
	VIV_TOKEN=$(cat "$data/token")
	export VIV_TOKEN
}
start

if [ -n "$tar" ]; then
	"$viv" load --quiet --tag base --format rootfs "$tar" >/dev/null
else
	"$viv" image base
fi

# run NAME ARGUMENT...: a bench that fails is told and named as not measured
failed=
bench() {
	name=$1
	shift
	echo "== viv bench $*" >&2
	if "$viv" bench "$@" --json >"$dir/$name.json"; then
		mv "$dir/$name.json" "$out/$name.json"
		cat "$out/$name.json"
	else
		rm -f "$out/$name.json"
		failed="$failed $name"
	fi
}

if [ -n "$quick" ]; then
	bench tti tti -n 20
	bench tti-pool-off tti -n 20 --pool-off --peer bwrap
	bench exec exec -n 50
	bench churn churn -n 80
	bench io io -n 1
	bench density density -n 20
	recover=20
else
	bench tti tti -n 500
	bench tti-pool-off tti -n 50 --pool-off --peer bwrap
	bench exec exec -n 500
	bench churn churn -n 400
	bench io io -n 3
	bench density density -n 100
	bench density-idle density -n 500
	bench density-many density -n 1000
	recover=500
fi
stop

# its outside world is a network namespace with this address
cat >"$dir/net.yaml" <<-END
	network:
	  grants:
	    - prefix: 198.18.0.2/32
	  resolvers: ["198.18.0.2:53"]
END
start --config "$dir/net.yaml"
bench net net ${quick:+-n 2}
stop

echo "== bench/npm.sh" >&2
if sh bench/npm.sh ${quick:+-n 1} ${tar:+-t "$tar"} -p "$port" -b "$viv" >"$dir/npm.json"; then
	mv "$dir/npm.json" "$out/npm.json"
	cat "$out/npm.json"
else
	rm -f "$out/npm.json"
	failed="$failed npm"
fi

echo "== recovery" >&2
if go run ./bench/recovery -viv "$viv" -data-dir "$data" -listen "127.0.0.1:$port" -n $recover -json >"$dir/recovery.json"; then
	mv "$dir/recovery.json" "$out/recovery.json"
	cat "$out/recovery.json"
else
	rm -f "$out/recovery.json"
	failed="$failed recovery"
fi

echo
go run ./bench/table "$out"/*.json
if [ -n "$failed" ]; then
	echo "failed:$failed" >&2
	exit 1
fi
