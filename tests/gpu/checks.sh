#!/usr/bin/env bash
# Every check that needs a GPU, from binaries that are already built; prints a line a check and ends with 1 if one failed.
#
#   tests/gpu/checks.sh DIR     DIR holds `glake` and, if it is to be run, `conformance_cuda` (both --release)
set -uo pipefail
dir=${1:?"usage: $0 DIR (with glake, and conformance_cuda if it is to be run)"}
traces=$(cd "$(dirname "$0")/../traces" && pwd)
failed=0
check() { # name, then the command; keeps its output for the lines below
    local name=$1; shift
    if output=$("$@" 2>&1); then echo "ok      $name"; else failed=1; echo "FAILED  $name"; echo "$output" | tail -n 20; fi
}

if [ -x "$dir/conformance_cuda" ]; then
    check "conformance suite on CUDA" "$dir/conformance_cuda" --test-threads 1
    echo "$output" | grep -E '^(FAILED|SKIPPED)' || true
fi
check "demo on CUDA, every byte compared" "$dir/glake" demo --device cuda
for trace in convmix fsdp_llama_full; do
    check "replay of $trace with stamped bytes" "$dir/glake" replay --device cuda --policy glake --verify "$traces/$trace.trace.gz"
done

echo; echo "driver time after the first fifth of the events, of the trace's recorded duration (at most 1 %, 0.4 % on average)"
"$dir/glake" replay --device cuda --policy glake --json "$traces"/*.trace.gz | python3 -c '
import gzip, json, sys
shares = []
for line in sys.stdin:
    r = json.loads(line)
    times = [int(l.split()[-1]) for l in gzip.open(f"{sys.argv[1]}/{r['"'trace'"']}.trace.gz", "rt") if l[0] in "arfs"]
    share = r["driver_us_late"] / (times[-1] - times[0])
    shares.append(share)
    print(f"        {r['"'trace'"']:16} utilization {r['"'utilization'"']:.4f}  driver {r['"'driver_us'"'] / 1e3:6.1f} ms, late {r['"'driver_us_late'"'] / 1e3:6.2f} ms = {share:.2%}")
print(f"        average {sum(shares) / len(shares):.2%}")
sys.exit(len(shares) != 5 or max(shares) > 0.01 or sum(shares) / len(shares) > 0.004)
' "$traces" && echo "ok      driver time" || { failed=1; echo "FAILED  driver time"; }

echo; echo "hot path"
"$dir/glake" bench alloc --device cuda --json || failed=1
if command -v compute-sanitizer >/dev/null; then
    check "compute-sanitizer on the demo" compute-sanitizer --error-exitcode 9 "$dir/glake" demo --device cuda
    echo "$output" | grep "ERROR SUMMARY" || true
fi
exit $failed
