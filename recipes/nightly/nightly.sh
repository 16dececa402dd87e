#!/usr/bin/env bash
# Run every .parquet, .jsonl and .csv file of INBOX through the job of job.toml into a file of the same name in OUTBOX,
# in the order of names, until MAX_SECONDS are over. What is not done goes on when the script is started again.
#
#     nightly.sh INBOX OUTBOX MAX_SECONDS [more options of `batchgen run`]
#
# Exit codes, as those of `batchgen run`: 0 all files are done; 1 something failed, start it again; 2 a file or an
# option is wrong, 4 too many rows of a file failed: somebody must look; 3 the time is over, 130 interrupted: both
# go on the next time.
set -uo pipefail

if [ $# -lt 3 ]; then
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
inbox=$1 outbox=$2 max_seconds=$3
shift 3
here=$(dirname "$(readlink -f "$0")")
[ -d "$inbox" ] || { echo "nightly: there is no directory $inbox" >&2; exit 2; }
mkdir -p "$outbox" || exit 2

job=
stopped=
# Asked to stop, ask the job, or the one that is just being started: it saves the rows that are done.
trap 'stopped=1; if [ -n "$job" ]; then kill -TERM "$job" 2>/dev/null; else early=1; fi' TERM INT

failed=0
# What somebody must look at is told tonight; what can be started again waits for the next night.
time_is_over() {
    case $failed in 2 | 4) exit "$failed" ;; *) exit 3 ;; esac
}

for input in "$inbox"/*; do
    [ -e "$input" ] || continue
    name=$(basename "$input")
    case $name in
    *.parquet | *.jsonl | *.csv) ;;
    *)
        echo "nightly: $input is not run: it is no .parquet, .jsonl or .csv file" >&2
        [ "$failed" -ne 0 ] || failed=2
        continue
        ;;
    esac
    output=$outbox/$name
    # An output appears when it is whole. One with too many failed rows is looked at again, so that every night says so.
    [ ! -e "$output" ] || [ -e "$output.failed" ] || continue
    early=
    [ -z "$stopped" ] || exit 130
    left=$((max_seconds - SECONDS))
    [ "$left" -gt 0 ] || time_is_over
    batchgen run --config "$here/job.toml" --input "$input" --output "$output" --max-time "${left}s" \
        --report "$output.report.json" --progress plain "$@" &
    job=$!
    [ -z "$early" ] || kill -TERM "$job" 2>/dev/null
    while true; do # a signal ends `wait`, not the job
        wait "$job"
        code=$?
        kill -0 "$job" 2>/dev/null || break
    done
    job=
    [ -z "$stopped" ] || [ "$code" -eq 0 ] || exit 130
    case $code in 1 | 2 | 4) echo "nightly: the job of $input ended with exit code $code" >&2 ;; esac
    case $code in
    0) rm -f "$output.failed" ;;
    3) time_is_over ;;
    130) exit 130 ;;
    2 | 4) # the other files may be fine
        [ "$code" -eq 2 ] || touch "$output.failed"
        [ "$failed" -ne 0 ] || failed=$code
        ;;
    *) failed=1 ;;
    esac
done
exit "$failed"
