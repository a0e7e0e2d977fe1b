#!/usr/bin/env bash
# Runs two_node across two network namespaces, joined by a virtual cable that this script makes and
# removes: the nearest thing to two hosts that one host has. Needs root.
set -Eeuo pipefail

usage() {
  cat <<'USAGE'
usage: netns.sh [--binary FILE] [FLAGS OF BOTH SIDES] [-- FLAGS OF THE PREFILL SIDE]

  --binary FILE   two_node; default: build/release/examples/two_node of this repository

example: netns.sh --checksum -- --requests 10 --fragmentation runs8
USAGE
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
binary=$root/build/release/examples/two_node
both=()
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help) usage; exit 0 ;;
    --binary)
      [ $# -ge 2 ] || { usage >&2; exit 2; }
      binary=$2
      shift
      ;;
    --) shift; break ;;
    *) both+=("$1") ;;
  esac
  shift
done

[ -x "$binary" ] || { echo "netns.sh: no $binary; build it (./dev build) or pass --binary" >&2; exit 2; }
command -v ip >/dev/null || { echo "netns.sh: the ip command is missing (Debian: iproute2)" >&2; exit 2; }
[ "$(id -u)" -eq 0 ] || { echo "netns.sh: making network namespaces needs root" >&2; exit 2; }

prefill=kvferry-p$$
decode=kvferry-d$$
prefill_pid=""
key=$(mktemp)
head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >"$key"
clean_up() {
  rm -f "$key"
  [ -z "$prefill_pid" ] || kill "$prefill_pid" 2>/dev/null || true
  ip netns delete "$prefill" 2>/dev/null || true  # Takes its end of the cable along, and so the other.
  ip netns delete "$decode" 2>/dev/null || true
}
trap clean_up EXIT
trap 'exit 130' INT TERM

if ! ip netns add "$prefill" || ! ip netns add "$decode"; then
  echo "netns.sh: this machine does not let us make network namespaces (in a container, it needs" \
    "CAP_SYS_ADMIN and CAP_NET_ADMIN)" >&2
  exit 2
fi
ip -n "$prefill" link add kv0 type veth peer name kv0 netns "$decode"
ip -n "$prefill" address add 10.77.0.1/24 dev kv0
ip -n "$decode" address add 10.77.0.2/24 dev kv0
for namespace in "$prefill" "$decode"; do
  ip -n "$namespace" link set lo up
  ip -n "$namespace" link set kv0 up
done
# The kernel takes up to a second to call a new cable connected, and UCX uses no other.
for namespace in "$prefill" "$decode"; do
  for _ in $(seq 50); do
    [ "$(ip -n "$namespace" -brief link show kv0 | awk '{print $2}')" != UP ] || continue 2
    sleep 0.1
  done
  echo "netns.sh: kv0 did not come up" >&2
  exit 1
done

flags=(--net-device kv0 --key-file "$key" ${both[@]+"${both[@]}"})
ip netns exec "$prefill" "$binary" --role prefill --listen 10.77.0.1:5600 "${flags[@]}" "$@" &
prefill_pid=$!
rc=0
ip netns exec "$decode" "$binary" --role decode --connect 10.77.0.1:5600 "${flags[@]}" || rc=$?
prefill_rc=0
wait "$prefill_pid" || prefill_rc=$?
prefill_pid=""
[ "$rc" -ne 0 ] || rc=$prefill_rc
exit "$rc"
