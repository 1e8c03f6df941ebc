#!/bin/sh
# Measures data parallelism between two hosts, one rank each, over networks of several speeds. The hosts are two network
# namespaces of this machine, joined by a link with a limited rate, with Open MPI over TCP. Needs root, iproute2 and
# mpirun.
#
#   benchmarks/two_hosts.sh TRAINER [STEPS] [RATES] [MICRO-BATCHES] [PYTHON]
#
# For each rate (in tc's notation) and micro-batch it prints tokens per second, the share of a step that a rank waits
# for communication, and three ratios. "of limit" is tokens per second over the limit by the longer of computing (two
# hosts without a rate limit and without communication) and sending. "with TCP" is the same with the processor's work
# for TCP: a host has one core here, which also copies sent and received bytes. Two Python programs that only send to
# each other measure this work for a byte. "of order" is the share of the limit by the order of a step, with that work
# as part of computing: nothing is sent before the first gradient is ready, and the last ready parameters are needed
# first. It needs bench_step_limit in the folder of TRAINER. PYTHON is an interpreter with torch and transformers, for
# PyTorch's DistributedDataParallel and FSDP2 over Gloo on the same hosts.
set -eu

trainer=$(realpath "${1:?TRAINER is missing: build/bin/train_llama}")
steps=${2:-8}
rates=${3:-10gbit 1gbit 300mbit}
batches=${4:-2 8}
python=${5:-}
here=$(cd "$(dirname "$0")" && pwd)
for tool in ip tc mpirun; do
  command -v "$tool" >/dev/null || { echo "$tool is not there: install iproute2 and openmpi-bin" >&2; exit 77; }
done
work=$(mktemp -d)
one=plait$$a two=plait$$b
clean() {
  ip netns del "$one" 2>/dev/null || true
  ip netns del "$two" 2>/dev/null || true
  rm -rf "$work"
}
trap clean EXIT
trap 'exit 1' INT TERM

ip netns add "$one"
ip netns add "$two"
ip link add veth1 netns "$one" type veth peer name veth1 netns "$two"
number=1
for host in "$one" "$two"; do
  ip -n "$host" addr add 10.209.7.$number/24 dev veth1
  ip -n "$host" link set lo up
  ip -n "$host" link set veth1 up
  # reno's window depends only on losses. BBR models the link, and takes a sender that computes in between for a slow
  # link.
  ip netns exec "$host" sysctl -qw net.ipv4.tcp_congestion_control=reno
  number=$((number + 1))
done
# mpirun starts processes on another host by this script.
cat >"$work/agent" <<AGENT
#!/bin/sh
shift
exec ip netns exec "$two" sh -c "\$*"
AGENT
chmod +x "$work/agent"

# median NAME: prints the medians of tokens per second and of the share waited, from the third step on.
median() {
  python3 - "$1" <<'PYTHON'
import json, statistics, sys
rows = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8")]
steps = [r for r in rows if "step" in r][2:]
print("%.0f %.3f" % (statistics.median(r["tokens_per_second"] for r in steps),
                     statistics.median(r["comm_share"] for r in steps)))
PYTHON
}
train() {  # train BATCH OPTIONS...: trains, and prints the output of `median`
  batch=$1
  shift
  OMPI_MCA_mpi_yield_when_idle=1 timeout 600 ip netns exec "$one" mpirun --allow-run-as-root -np 2 \
    -H 10.209.7.1,10.209.7.2 --mca plm_rsh_agent "$work/agent" --mca btl tcp,self --mca btl_tcp_if_include \
    10.209.7.0/24 --mca oob_tcp_if_include 10.209.7.0/24 --bind-to none -x OMP_NUM_THREADS=1 \
    "$trainer" --backend mpi --model bench-512 --data "$here/../examples/data/kjv.txt" --seq 256 --sample 0 \
    --micro-batch "$batch" --steps "$steps" --log "$work/log" "$@" >"$work/out" 2>&1 ||
    { grep -v "^step" "$work/out" | head -n 20 >&2; exit 1; }
  median "$work/log"
}
parameters() { python3 -c '
import json, sys
print([json.loads(line) for line in open(sys.argv[1])][-1]["summary"]["parameters"])' "$work/log"; }

# Runs PyTorch's two ranks on the two hosts, over Gloo. Prints tokens per second, without a share waited.
pytorch() {  # pytorch BATCH OPTIONS...
  batch=$1
  shift
  number=0
  for host in "$one" "$two"; do
    GLOO_SOCKET_IFNAME=veth1 timeout 600 ip netns exec "$host" "$python" "$here/pytorch_llama.py" --join \
      10.209.7.1:29571 --rank $number --dp 2 --micro-batch "$batch" --seq 256 --hidden 512 --layers 4 --heads 8 \
      --kv-heads 8 --ffn 1536 --vocab 4096 --warm-up 2 --steps "$((steps - 2))" "$@" >"$work/torch$number" 2>&1 &
    number=$((number + 1))
  done
  wait
  grep -q tokens_per_second "$work/torch0" || { tail -n 5 "$work/torch0" "$work/torch1" >&2; exit 1; }
  python3 -c 'import json, sys
print(json.loads(open(sys.argv[1]).read().strip().splitlines()[-1])["tokens_per_second_median"], "nan")' "$work/torch0"
}

# Measures the processor seconds for each byte that a host sends while it receives one, on two hosts that do nothing
# else.
cat >"$work/tcp.py" <<'PYTHON'
import resource, socket, sys, threading, time
serves, count = sys.argv[1] == "serve", 100_000_000
if serves:
    with socket.create_server(("10.209.7.1", 29573)) as door:
        link = door.accept()[0]
else:
    for _ in range(100):
        try:
            link = socket.create_connection(("10.209.7.1", 29573))
            break
        except OSError:
            time.sleep(0.1)
data, into = memoryview(bytes(1 << 20)), bytearray(1 << 20)
def send():
    left = count
    while left:
        left -= link.send(data[:min(left, len(data))])
thread = threading.Thread(target=send)
begin = resource.getrusage(resource.RUSAGE_SELF)
thread.start()
left = count
while left:
    left -= link.recv_into(into, min(left, len(into)))
thread.join()
end = resource.getrusage(resource.RUSAGE_SELF)
print((end.ru_utime - begin.ru_utime + end.ru_stime - begin.ru_stime) / count)
PYTHON
tcp_seconds() {
  ip netns exec "$one" python3 "$work/tcp.py" serve >"$work/tcp" &
  ip netns exec "$two" python3 "$work/tcp.py" join >/dev/null
  wait
  cat "$work/tcp"
}

order=$(dirname "$trainer")/bench_step_limit
printf '%-9s %5s  %-28s %8s %7s %9s %9s %9s\n' link batch policy tok/s waited 'of limit' 'with TCP' 'of order'
for batch in $batches; do
  for rate in $rates; do
    # Measures the computing time of the slower host, because a step waits for both: a run without a mesh on each, at
    # one time.
    for number in 1 2; do
      OMP_NUM_THREADS=1 timeout 600 "$trainer" --model bench-512 --data "$here/../examples/data/kjv.txt" --seq 256 \
        --sample 0 --micro-batch "$batch" --steps "$steps" --log "$work/alone$number" >/dev/null 2>&1 &
    done
    wait
    alone=$( (median "$work/alone1"; median "$work/alone2") | sort -n | head -n 1)
    alone=${alone% *}
    for host in "$one" "$two"; do
      ip netns exec "$host" tc qdisc replace dev veth1 root tbf rate "$rate" burst 512kb latency 200ms
    done
    tcp=$(tcp_seconds)
    for policy in 'replicated --overlap off' replicated 'zero1 --overlap off' zero1 zero2 zero3 \
      ${python:+'PyTorch DDP' 'PyTorch FSDP2'}; do
      # shellcheck disable=SC2086  # a list of options
      case $policy in
        *DDP) found=$(pytorch "$batch") ;;
        *FSDP2) found=$(pytorch "$batch" --fsdp) ;;
        *) found=$(train "$batch" --mesh dp=2 --data-parallel $policy) ;;
      esac
      python3 - "$rate" "$batch" "$policy" "$found" "$alone" "$(parameters)" "$tcp" "$order" <<'PYTHON'
import os, subprocess, sys
rate, batch, policy, found, alone, parameters, tcp, order = sys.argv[1:]
speed, waited = (float(x) for x in found.split())
unit = {"gbit": 1e9, "mbit": 1e6}[rate[-4:]] / 8
moved = 4 * float(parameters) * (1.5 if policy.startswith("zero3") or "FSDP" in policy else 1)  # each way, of two ranks
tokens = 2 * int(batch) * 256
computing, bandwidth = tokens / (2 * float(alone)), float(rate[:-4]) * unit
with_tcp = computing + moved * float(tcp)
limits = [tokens / max(work, moved / bandwidth) for work in (computing, with_tcp)]
if os.access(order, os.X_OK):
    lines = subprocess.run([order, "--computing-us", str(round(1e6 * with_tcp)), "--bytes-per-second",
                            str(round(bandwidth))], check=True, capture_output=True, text=True).stdout.splitlines()
    limits += [tokens / float(line.split()[-1]) for line in lines if line.split()[:-1] == policy.split()]
print(f"{rate:<9} {batch:>5}  {policy:<28} {speed:8.0f} {waited:7.3f}", *(f"{speed / limit:9.3f}" for limit in limits))
PYTHON
    done
  done
done
