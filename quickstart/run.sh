#!/bin/sh
# The main job, from nothing to a result on this disk, with the commands that a
# person would type. `make quickstart` runs it after the build.
#
#   quickstart/run.sh [--keep] [--data-dir DIR] [--listen ADDR] [--config FILE]
#
#   --keep      leave the daemon and the sandbox running, and say how to use them
#   --data-dir  keep images and state there (default: a directory below /tmp that
#               is removed at the end)
#   --listen    address of the daemon (default: a free port of loopback)
#   --config    instead of the config that this script writes
#
# Needs root. A daemon that runs already is not touched.
set -eu
cd "$(dirname "$0")/.."

viv=$PWD/bin/viv
result=$PWD/bin/quickstart-result.xml
keep= data= listen=127.0.0.1:0 config=
usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; }
while [ $# -gt 0 ]; do
	case $1 in
	--keep) keep=1 ;;
	--data-dir) data=${2:?--data-dir needs a directory} && shift ;;
	--listen) listen=${2:?--listen needs an address} && shift ;;
	--config) config=${2:?--config needs a file} && shift ;;
	-h | --help) usage && exit 0 ;;
	*) usage >&2 && exit 2 ;;
	esac
	shift
done
[ "$(id -u)" = 0 ] || { echo "quickstart: run this as root" >&2 && exit 1; }
[ -x "$viv" ] || { echo "quickstart: $viv is missing: make build" >&2 && exit 1; }

# --- a place for everything, and its end
own=
if [ -z "$data" ]; then
	data=$(mktemp -d /tmp/vivarium.XXXXXX)
	own=1
else
	mkdir -p "$data"
	data=$(cd "$data" && pwd -P)
fi
chmod 0711 "$data" # the sentries, which are nobody, start their program from below it
log=$data/quickstart.log
out=$data/quickstart.out
table=$data/quickstart.table
: >"$log" && : >"$table"
pid=

# in a session of its own: Ctrl-C here is not to end it before it has tidied up
start_daemon() {
	setsid "$viv" serve --config "$config" --data-dir "$data" --listen "$listen" </dev/null >>"$log" 2>&1 &
	pid=$!
	tries=0
	until "$viv" ps >/dev/null 2>&1; do
		kill -0 "$pid" 2>/dev/null || { pid= && echo "quickstart: the daemon did not start" >&2 && return 1; }
		tries=$((tries + 1))
		[ "$tries" -lt 300 ] || { echo "quickstart: the daemon does not answer" >&2 && return 1; }
		sleep 0.1
	done
}
stop_daemon() {
	[ -n "$pid" ] || return 0
	kill "$pid" 2>/dev/null || :
	wait "$pid" 2>/dev/null || :
	pid=
}
finish() {
	code=$?
	trap - EXIT
	trap '' INT TERM HUP
	if [ "$code" != 0 ]; then
		echo "quickstart: failed. The end of the daemon's log:" >&2
		tail -n 15 "$log" >&2
		if [ -n "$pid" ] && { "$viv" ps >/dev/null 2>&1 || start_daemon; }; then
			ids=$("$viv" ps --quiet --tag quickstart=1 2>/dev/null || :)
			[ -z "$ids" ] || "$viv" rm -f $ids || :
		fi
	fi
	stop_daemon
	if [ -e "$data/net" ]; then # it goes with the last sandbox
		echo "quickstart: something is left; look with: viv serve --data-dir $data" >&2
	elif [ -n "$own" ]; then
		rm -rf "$data"
	fi
	exit "$code"
}
trap finish EXIT
trap 'exit 130' INT TERM HUP

# --- steps: the command is shown as it can be typed, its time goes to the table
now() { date +%s%N; }
took() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%.2f s", (b - a) / 1e9 }'; }
show() { # a command as it can be typed
	printf '$ viv'
	for a; do
		case $a in
		'' | *[!A-Za-z0-9_./:=@,+-]*) printf " '%s'" "$a" ;;
		*) printf ' %s' "$a" ;;
		esac
	done
	echo
}
row() { printf '%s\t%s\t%s\n' "$1" "$2" "$3" >>"$table"; } # step, result, time
# step NAME ARGS...: viv ARGS, its output in $out
step() {
	name=$1 && shift
	show "$@"
	begin=$(now)
	code=0
	"$viv" "$@" </dev/null >"$out" 2>&1 || code=$?
	if [ "$code" != 0 ]; then
		tail -n 30 "$out"
		echo "quickstart: $name failed with exit code $code" >&2
		exit 1
	fi
	time=$(took "$begin" "$(now)")
	printf '  # %s\n' "$time"
}

# --- config: the package mirrors of this host, where their addresses are of
# the kind that no sandbox reaches otherwise. Each is listed in the file.
special() { # is the IPv4 address in a special-purpose range (network/special.go)?
	case $1 in
	10.* | 169.254.* | 192.168.* | 198.18.* | 198.19.* | 198.51.100.* | 203.0.113.* | 192.0.[02].*) return 0 ;;
	172.1[6-9].* | 172.2[0-9].* | 172.3[01].*) return 0 ;;
	100.6[4-9].* | 100.[7-9][0-9].* | 100.1[01][0-9].* | 100.12[0-7].*) return 0 ;;
	192.88.99.* | 192.31.196.* | 192.52.193.* | 192.175.48.* | 24[0-9].* | 25[0-4].*) return 0 ;;
	esac
	return 1
}
mirrors() { # HOST PORT of the HTTP repositories in apt's sources
	cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources 2>/dev/null |
		grep -E '^[[:space:]]*(deb|deb-src|URIs:)[[:space:]]' | grep -oE 'https?://[^/ ]+' | sort -u |
		sed -E 's#^https?://([^@/]*@)?##; s#:# #' | awk '{ print $1, ($2 ? $2 : "80,443") }'
}
write_config() {
	echo "# Written by quickstart/run.sh. Every setting: viv serve --print-config"
	echo "pool:"
	echo "  size: 2"
	echo "network:"
	grants=$(mirrors | while read -r host ports; do
		getent ahostsv4 "$host" | awk '{ print $1 }' | sort -u | while read -r ip; do
			! special "$ip" || echo "$ip $ports $host"
		done
	done | sort -u -k 1,2 | while read -r ip ports host; do
		printf '    - prefix: %s/32 # %s, a package mirror of this host\n      ports: [%s]\n' "$ip" "$host" "$ports"
	done)
	if [ -n "$grants" ]; then
		printf '  grants:\n%s\n' "$grants"
	else
		echo "  grants: [] # the package mirrors of this host have public addresses"
	fi
}
if [ -z "$config" ]; then
	config=$data/config.yaml
	write_config >"$config"
fi
echo "# $config"
sed 's/^/  /' "$config"
echo

# --- the daemon
export VIV_DATA_DIR="$data" VIV_SERVER="unix://$data/viv.sock"
unset VIV_TOKEN VIV_CONFIG # those of another daemon
show serve --config "$config" --data-dir "$data" --listen "$listen"
begin=$(now)
start_daemon || exit 1
time=$(took "$begin" "$(now)")
address=$(sed -n 's/.*msg=listening network=tcp address=\([^ ]*\).*/\1/p' "$log" | tail -n 1)
port=${address##*:}
printf '  # %s, http://%s\n' "$time" "$address"
row "start the daemon" "$address" "$time"

# --- the image
begin=$(now)
show image base
make_image() {
	if [ -t 2 ]; then
		"$viv" image base </dev/null # with its progress
	else
		"$viv" image base </dev/null >"$out" 2>&1 || { tail -n 30 "$out" && return 1; }
	fi
}
# once more: a mirror or a resolver may be away for a moment
make_image || { echo "quickstart: trying once more" >&2 && sleep 5 && make_image; }
time=$(took "$begin" "$(now)")
printf '  # %s\n' "$time"
image=base:latest
row "make the base image" "$("$viv" images | awk -v i="$image" '$1 == i { print $4, $5 }')" "$time"

# --- the job
step "create a sandbox" create --name quickstart --tag quickstart=1 --timeout 1h --memory 2GiB "$image"
id=$(cat "$out")
row "create a sandbox" "$(cat "$out")" "$time"

step "enable source packages" exec quickstart -- sh -c 'sed -i "s/^Types: deb$/Types: deb deb-src/" /etc/apt/sources.list.d/*.sources'
step "read the package lists" exec quickstart -- apt-get -q update
row "read the package lists" "$(sed -n 's/^\(Fetched [^(]*\).*/\1/p' "$out")" "$time"

"$viv" exec quickstart -- sh -c 'command -v cmake' >/dev/null 2>&1 && { echo "quickstart: cmake is in the image already" >&2 && exit 1; }
step "install a package" exec quickstart -- apt-get -q install -y --no-install-recommends build-essential cmake
row "install build-essential, cmake" "$("$viv" exec quickstart -- cmake --version | head -n 1)" "$time"

step "fetch the source of cJSON" exec -w /root quickstart -- apt-get -q source cjson
row "fetch the source of cJSON" "$("$viv" exec -w /root quickstart -- sh -c 'echo cjson-*/ | tr -d /')" "$time"

# the directory has the version in its name
src=/root/$("$viv" exec -w /root quickstart -- sh -c 'echo cjson-*/ | tr -d /')
step "configure it" exec -w "$src" quickstart -- cmake -S . -B build -DENABLE_CJSON_UTILS=On
begin=$(now)
show exec -w "$src" quickstart -- make -C build -j2
"$viv" exec -w "$src" quickstart -- make -C build -j2 >"$out" 2>&1 || { tail -n 30 "$out" && exit 1; }
time=$(took "$begin" "$(now)") && printf '  # %s\n' "$time"
row "build it" "$(grep -c 'Built target' "$out") targets" "$time"

step "run its tests" exec -w "$src" quickstart -- ctest --test-dir build --output-junit /root/result.xml
sed -n '/tests passed/{s/^/  /;p}' "$out"
row "run its own tests" "$(sed -n 's/^\(.*tests passed.*\)/\1/p' "$out")" "$time"

rm -f "$result"
step "copy the result out" cp quickstart:/root/result.xml "$result"
tests=$(sed -n 's/^[[:space:]]*tests="\([0-9]*\)".*/\1/p' "$result")
failures=$(sed -n 's/^[[:space:]]*failures="\([0-9]*\)".*/\1/p' "$result")
[ "${tests:-0}" -gt 0 ] && [ "$failures" = 0 ] || { echo "quickstart: $result tells of no tests, or of failures" >&2 && exit 1; }
row "copy the result out" "bin/${result##*/}: $tests tests, $failures failures" "$time"

# --- what it must not reach. A door proves something only if it is there: the
# daemon answers on the host's loopback, and the neighbour serves itself.
step "create a neighbour" create --name quickstart-neighbour --tag quickstart=1 --probe-tcp 8000 --wait-ready "$image" -- python3 -m http.server 8000
neighbour_id=$(cat "$out")
neighbour=$("$viv" inspect quickstart-neighbour | sed -n 's/^ *"address": "\([0-9.]*\)".*/\1/p')
[ -n "$neighbour" ] || { echo "quickstart: the neighbour has no address" >&2 && exit 1; }
"$viv" exec quickstart-neighbour -- curl -sS -o /dev/null http://127.0.0.1:8000/ || { echo "quickstart: the neighbour does not serve" >&2 && exit 1; }
curl -sS -o /dev/null "http://$address/healthz" || { echo "quickstart: the daemon does not answer on $address" >&2 && exit 1; }
gateway=$("$viv" exec quickstart -- python3 -c '
import socket
for line in open("/proc/net/route").readlines()[1:]:
    f = line.split()
    if f[1] == "00000000":
        print(socket.inet_ntoa(bytes.fromhex(f[2])[::-1]))')
refused() { # NAME HOST:PORT/PATH
	show exec quickstart -- curl -sS --max-time 3 "http://$2"
	begin=$(now)
	code=0
	"$viv" exec quickstart -- curl -sS --noproxy '*' --max-time 3 "http://$2" </dev/null >"$out" 2>&1 || code=$?
	time=$(took "$begin" "$(now)")
	sed 's/^/  /' "$out"
	# curl(1): 7 could not connect, 28 no answer in time
	case $code in
	7 | 28) row "refused: $1" "$2" "$time" ;;
	*) echo "quickstart: $1 was not refused (exit code $code)" >&2 && exit 1 ;;
	esac
}
refused "the metadata address" 169.254.169.254/latest/meta-data/
refused "a private address" 192.168.0.1/
refused "another private address" 10.0.0.1/
refused "the host's loopback" "127.0.0.1:$port/healthz"
[ -z "$gateway" ] || refused "the host, by its gateway" "$gateway:$port/healthz"
refused "a neighbour sandbox" "$neighbour:8000/"

if [ -n "$keep" ]; then
	trap - EXIT INT TERM HUP
	echo
	echo "The daemon (process $pid) and two sandboxes go on running. As root:"
	echo "  export VIV_DATA_DIR=$data VIV_SERVER=$VIV_SERVER"
	echo "  $viv exec -it quickstart -- bash"
	echo "To end it all:"
	echo "  $viv rm -f quickstart quickstart-neighbour; kill $pid; tail --pid=$pid -f /dev/null; rm -r $data"
	exit 0
fi

# --- the end
step "stop them" stop quickstart quickstart-neighbour
# a name is free again once its sandbox has ended; the id is for good
row "stop both sandboxes" "$("$viv" inspect "$id" | sed -n 's/^ *"reason": "\([a-z_]*\)".*/reason: \1/p' | head -n 1)" "$time"
step "forget them" rm "$id" "$neighbour_id"
begin=$(now)
echo "\$ kill $pid"
stop_daemon
time=$(took "$begin" "$(now)")
row "stop the daemon" "" "$time"

# what Vivarium makes on a host carries six letters of the data directory
instance=$(printf %s "$data" | sha256sum | cut -c1-6)
left() { find "$@" -maxdepth 1 -name "*$instance*" 2>/dev/null; }
look() {
	# processes that name a file of the data directory; grep itself does not
	echo "$data/" | grep -lasF -f - /proc/[0-9]*/cmdline | while read -r f; do
		echo "process ${f%/cmdline}: $(tr '\0' ' ' 2>/dev/null <"$f" | cut -c 1-120)"
	done
	grep -E " $data/|viv-$instance" /proc/self/mountinfo || :
	left /run/netns /sys/class/net /sys/fs/cgroup /sys/fs/cgroup/*/ || :
	# where nft is not installed there is nothing to ask with
	! command -v nft >/dev/null 2>&1 || nft list tables 2>/dev/null | grep -F "$instance" || :
}
# a process that was told to end may take a moment
tries=0
leftovers=$(look)
while [ -n "$leftovers" ] && [ "$tries" -lt 20 ]; do
	sleep 0.1
	tries=$((tries + 1))
	leftovers=$(look)
done
if [ -n "$leftovers" ]; then
	printf 'quickstart: left on the host:\n%s\n' "$leftovers" >&2
	exit 1
fi
row "left on the host" "no process, mount, namespace, link, group, rule" ""

echo
awk -F '\t' '
	{ a[NR] = $1; b[NR] = $2; c[NR] = $3; if (length($1) > wa) wa = length($1); if (length($2) > wb) wb = length($2) }
	END { for (i = 1; i <= NR; i++) printf "%-" wa "s  %-" wb "s  %10s\n", a[i], b[i], c[i] }' "$table"
