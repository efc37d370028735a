#!/bin/sh
# Measures `npm ci` of a real project in a sandbox: with the package cache warm,
# with it empty, and without it. Prints one JSON object, as `viv bench --json`
# does; value is how many times faster the warm cache is than none. What no cache
# can take away is measured too: npm ci from npm's own files, without a network
# (local). And what a cache is for alone: fetching the packages, and no npm
# (fetch_off, fetch_warm).
#
#   bench/npm.sh [-n TIMES] [-t ROOTFS.tar] [-p PORT] [-b VIV]
#
# -n  how often each is measured, by turns (5)
# -t  root filesystem to use; without it a Debian base image is made
# -b  program to measure
#
# Needs root, npm's registry and Debian's packages: whatever this host's own
# package tools are set to. A daemon of its own, in a temporary directory.
set -eu
cd "$(dirname "$0")/.."

# express 4.21.2, its development dependencies included: some 400 packages
project=express version=4.21.2
times=5 tar= port=7879 viv=bin/viv
usage() { echo "usage: bench/npm.sh [-n TIMES] [-t ROOTFS.tar] [-p PORT] [-b VIV]" >&2 && exit 2; }
while getopts n:t:p:b: opt; do
	case $opt in
	n) times=$OPTARG ;;
	t) tar=$OPTARG ;;
	p) port=$OPTARG ;;
	b) viv=$OPTARG ;;
	*) usage ;;
	esac
done
case $times in '' | *[!0-9]* | 0) usage ;; esac
[ "$(id -u)" = 0 ] || { echo "bench/npm.sh: run it as root" >&2; exit 1; }
viv=$(realpath "$viv")
[ -x "$viv" ] || { echo "bench/npm.sh: there is no $viv: make build" >&2; exit 1; }

dir=$(mktemp -d /tmp/viv-npm.XXXXXX)
chmod 711 "$dir"
data=$dir/data
pid= id=
start() {
	setsid "$viv" serve --config "$dir/config.yaml" --data-dir "$data" --listen "127.0.0.1:$port" --log-level warn 2>>"$dir/serve.log" &
	pid=$!
	tries=0
	until "$viv" ps >/dev/null 2>&1; do
		tries=$((tries + 1))
		if [ $tries -gt 100 ] || ! kill -0 "$pid" 2>/dev/null; then
			cat "$dir/serve.log" >&2
			return 1
		fi
		sleep 0.1
	done
}
stop() {
	[ -n "$pid" ] || return 0
	kill "$pid" 2>/dev/null || true
	wait "$pid" 2>/dev/null || true
	pid=
}
cleanup() {
	trap - EXIT
	trap '' INT TERM
	if [ -n "$id" ]; then
		[ -n "$pid" ] || start || true
		"$viv" rm --force "$id" >/dev/null 2>&1 || true
	fi
	stop
	rm -rf "$dir"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# --- configuration: where this host's package tools get theirs, and grants for
# those addresses of them that no sandbox reaches otherwise
special() { # is the IPv4 address in a special-purpose range (network/policy/special.go)?
	case $1 in
	10.* | 169.254.* | 192.168.* | 198.18.* | 198.19.* | 198.51.100.* | 203.0.113.* | 192.0.[02].*) return 0 ;;
	172.1[6-9].* | 172.2[0-9].* | 172.3[01].*) return 0 ;;
	100.6[4-9].* | 100.[7-9][0-9].* | 100.1[01][0-9].* | 100.12[0-7].*) return 0 ;;
	192.88.99.* | 192.31.196.* | 192.52.193.* | 192.175.48.* | 24[0-9].* | 25[0-4].*) return 0 ;;
	esac
	return 1
}
"$viv" network preset --from-host >"$dir/host.yaml" 2>/dev/null
# registry KIND: the URL of its first upstream
registry() {
	awk -v k="    $1:" '/^cache:/ { c = 1 } c && $0 == k { on = 1; next } on && /^    [a-z]/ { exit } on && $1 == "url:" { print $2; exit }' "$dir/host.yaml"
}
registry=$(registry npm)
[ -n "$registry" ] || { echo "bench/npm.sh: no npm registry is known on this host" >&2; exit 1; }
grants=$(grep -oE 'https?://[^/ ]+' "$dir/host.yaml" | sed -E 's#^https?://([^@/]*@)?##; s#:.*##' | sort -u | while read -r host; do
	getent ahostsv4 "$host" | awk '{ print $1 }' | sort -u | while read -r ip; do
		! special "$ip" || echo "$ip"
	done
done | sort -u | sed 's#.*#    - prefix: &/32#')
awk -v grants="$grants" '
	{ print }
	/^network:/ && grants != "" { print "  grants:"; print grants }
	/^cache:/ { print "  enabled: true" }' "$dir/host.yaml" >"$dir/config.yaml"
printf 'pool:\n  size: 1\n' >>"$dir/config.yaml"

unset VIV_TOKEN VIV_CONFIG # those of another daemon
VIV_SERVER=unix://$data/viv.sock VIV_DATA_DIR=$data
export VIV_SERVER VIV_DATA_DIR
start

# --- a sandbox with Node.js and the project
say() { echo "npm: $*" >&2; }
# loud COMMAND...: its output only if it fails
loud() {
	"$@" </dev/null >"$dir/out" 2>&1 || { code=$?; tail -n 20 "$dir/out" >&2; return $code; }
}
say "make the image"
if [ -n "$tar" ]; then
	loud "$viv" load --quiet --tag base --format rootfs "$tar"
else
	loud "$viv" image base
fi
id=$("$viv" create --timeout 3h --memory 3GiB base)
# the host's authorities: its registry may be signed by one of its own
ca=/etc/ssl/certs/ca-certificates.crt
[ ! -f $ca ] || loud "$viv" cp $ca "$id:/root/ca.crt"
# in PROGRAM [ARGUMENT...]: a script inside; the registry is its $registry
in_sandbox() {
	script=$1
	shift
	"$viv" exec -e "registry=$registry" -e NODE_EXTRA_CA_CERTS=/root/ca.crt -e npm_config_update_notifier=false \
		-e npm_config_audit=false -e npm_config_fund=false -e npm_config_replace_registry_host=always "$id" -- sh -euc "$script" sh "$@"
}
# direct: npm as it would be without a cache
direct='export NPM_CONFIG_REGISTRY="$registry" NPM_CONFIG_OMIT_LOCKFILE_REGISTRY_RESOLVED=false;'
say "install Node.js"
loud in_sandbox 'apt-get -q update && apt-get -q install -y --no-install-recommends nodejs npm'
say "fetch $project $version"
loud in_sandbox "$direct"'
	cd /root
	npm pack --silent "$1@$2"
	tar xzf "$1-$2.tgz"
	cd package
	npm install --package-lock-only --ignore-scripts' "$project" "$version"
packages=$(in_sandbox 'cd /root/package && node -e "console.log(Object.keys(require(\"./package-lock.json\").packages).length - 1)"')
case $packages in '' | *[!0-9]*) echo "bench/npm.sh: the lock file lists no packages" >&2; exit 1 ;; esac

# --- npm ci, in milliseconds; $own is npm's cache, removed before
ci='
	cd /root/package
	rm -rf node_modules $own
	sync
	begin=$(date +%s%N)
	npm ci $flags >/root/ci.log 2>&1 || { tail -n 20 /root/ci.log >&2; exit 1; }
	end=$(date +%s%N)
	test -d node_modules/mocha
	echo $(((end - begin) / 1000000))'
plain='own=/root/.npm flags=;'
local='own= flags=--offline;'
# every package of the lock file, 15 at once as npm has it, and nothing else
cat >"$dir/fetch.js" <<'END'
const [registry, base] = process.argv.slice(2).map(u => u.replace(/\/$/, ''))
const http = require(base.split(':')[0])
const agent = new http.Agent({ keepAlive: true, maxSockets: 15 })
const lock = require('/root/package/package-lock.json')
const urls = Object.values(lock.packages).map(p => p.resolved).filter(Boolean)
  .map(u => base + (u.startsWith(registry) ? u.slice(registry.length) : new URL(u).pathname))
const begin = Date.now()
let left = urls.length
for (const url of urls) {
  http.get(url, { agent }, res => {
    if (res.statusCode !== 200) throw new Error(res.statusCode + ' ' + url)
    res.resume().on('end', () => {
      if (--left === 0) { console.log(Date.now() - begin); process.exit() }
    })
  })
}
END
loud "$viv" cp "$dir/fetch.js" "$id:/root/fetch.js"
# one KIND SCRIPT
one() {
	took=$(in_sandbox "$2" </dev/null)
	case $took in '' | *[!0-9]*) return 1 ;; esac
	say "$1 $took ms"
	echo "$took" >>"$dir/$1"
}
say "npm ci of $packages packages"
for _ in $(seq "$times"); do
	one off "$direct$plain$ci"
	one fetch_off 'node /root/fetch.js "$registry" "$registry"'
	# the sandbox lives on while the daemon is away
	stop
	rm -rf "$data/packages"
	start
	one cold "$plain$ci"
	one warm "$plain$ci"
	one local "$local$ci"
	one fetch_warm 'node /root/fetch.js "$registry" "$NPM_CONFIG_REGISTRY"'
done

median() { sort -n "$dir/$1" | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }
stages=
for kind in off cold warm local fetch_off fetch_warm; do
	stages="$stages${stages:+,}\"$kind\":{\"p50_ms\":$(median $kind)}"
done
value=$(awk -v off="$(median off)" -v warm="$(median warm)" 'BEGIN { printf "%.3f", off / warm }')
note="npm ci of $project $version, $packages packages, no node_modules and nothing in npm's own cache; value is off by warm, medians"
printf '{"bench":"npm","runtime":"gvisor","n":%d,"value":%s,"unit":"times","peers":{},"stages":{%s},"notes":["%s"]}\n' "$times" "$value" "$stages" "$note"
