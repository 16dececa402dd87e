#!/bin/sh
# workers.sh N [options of `batchgen run`]: N workers on this machine on one output, each with its share of the cores.
# Ends with 0 once the output is complete, else with the exit code of the first worker that failed.
set -u
workers=$1
shift
threads=$(($(nproc) / workers))
[ "$threads" -ge 1 ] || threads=1
pids=""
for worker in $(seq 0 $((workers - 1))); do
    # Threads of the kernels are pinned: each worker needs cores of its own.
    first=$((worker * threads % $(nproc)))
    BATCHGEN_NUM_THREADS=$threads OMP_NUM_THREADS=$threads \
        taskset --cpu-list "$first-$((first + threads - 1))" ${BATCHGEN:-batchgen} run --share "$@" &
    pids="$pids $!"
done
trap 'kill $pids 2>/dev/null' INT TERM
code=0
complete=""
for pid in $pids; do
    while :; do # a signal ends a wait before its worker has ended
        wait "$pid"
        ended=$?
        kill -0 "$pid" 2>/dev/null || break
    done
    if [ "$ended" -eq 0 ]; then complete=1; elif [ "$code" -eq 0 ]; then code=$ended; fi
done
[ -n "$complete" ] && exit 0
exit "$code"
