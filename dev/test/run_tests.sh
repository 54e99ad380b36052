#!/bin/sh
# run_tests.sh "command that compiles for other architectures" program...
#
# Runs the test programs (.py files by python3) and the command, whatever fails. The last line is
# "N passed, N failed, N skipped", and the exit code is 1 if anything failed. Each program has
# TEST_LIMIT · TEST_PATIENCE seconds, and what it started is killed at its end.
#
# With 16 cores or more, what uses no GPU runs in the background: programs in Python, programs
# without a .cu file, and the compilation. So does test_attention, which takes longest. test_program
# trains on several GPUs, so it runs before any other program that uses one.
archs=$1
shift
limit=${TEST_LIMIT:-1200}
cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)  # nproc obeys these variables
background=
if [ "$cores" -ge 16 ]; then
    background=yes
fi
# Threads that spin while they wait for each other take cores that other programs need.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
# The reference's small models gain nothing from more than 16 threads: those of 64 cores mostly wait
# for each other. But test_attention's references have long sequences, whose rows the threads share.
attention_threads=${OMP_NUM_THREADS:-$cores}
if [ "$cores" -gt 16 ]; then
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-16}"
fi

. "$(dirname "$0")/within.sh"
logs=$scratch/logs
mkdir "$logs"
passed=0
failed=0
skipped=0

# Runs a program. Its output is then in $logs/<name>, and its exit code in $logs/<name>.code.
run() {
    log=$logs/$(basename "$1")
    case $1 in
    *.py)
        if command -v python3 >/dev/null; then
            within "$limit" python3 "$1"
        else
            echo "no python3"
            echo "0 passed, 0 failed, 1 skipped"
        fi ;;
    *) within "$limit" ./"$1" ;;
    esac >"$log" 2>&1
    echo $? >"$log.code"
}

compile() {
    within "$limit" nice $archs >"$logs/archs" 2>&1
    echo $? >"$logs/archs.code"
}

# Prints a program's output and adds the counts in its last line to the totals. A program without
# such a line counts as one failure, and so does one whose exit code tells of a failure that its
# counts do not have.
report() {
    log=$logs/$(basename "$1")
    code=$(cat "$log.code")
    echo "== $1"
    cat "$log"

    program=$1
    set -- $(tail -n 1 "$log" |
        sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped$/\1 \2 \3/p')
    if [ $# -ne 3 ] || { [ "$code" -ne 0 ] && [ "$2" -eq 0 ]; }; then
        echo "$program exited with code $code, which does not fit its last line"
        set -- 0 1 0
    fi
    passed=$((passed + $1))
    failed=$((failed + $2))
    skipped=$((skipped + $3))
}

# make builds dev/NAME from dev/test/NAME.cu, or from a .cpp file if there is no such.
source_of() {
    echo "$(dirname "$1")/test/$(basename "$1").cu"
}

# Which programs run when. The first pattern that fits a program decides.
before=      # one at most: first, alone on the GPUs
longest=     # one at most: beside the foreground
foreground=  # one after the other
others=      # in the background from the beginning, or else at the end
for program in "$@"; do
    case $background,$program in
    *.py) others="$others $program" ;;
    *,*/test_program) before=$program ;;
    yes,*/test_attention) longest=$program ;;
    yes,*)
        if [ -e "$(source_of "$program")" ]; then
            foreground="$foreground $program"
        else
            others="$others $program"
        fi ;;
    *) foreground="$foreground $program" ;;
    esac
done

if [ "$background" ]; then
    for program in $others; do
        (export OMP_NUM_THREADS=2; run "$program") &  # the foreground has most cores
    done
    compile &
fi
if [ "$before" ]; then
    run "$before"
    report "$before"
fi
if [ "$longest" ]; then
    (export OMP_NUM_THREADS="$attention_threads"; run "$longest") &
fi
for program in $foreground; do
    run "$program"
    report "$program"
done
wait
if [ "$longest" ]; then
    report "$longest"
fi
for program in $others; do
    [ "$background" ] || run "$program"
    report "$program"
done

echo "== every kernel for each kind of architecture, no warnings, in attention no spills, no serialized wgmma"
[ "$background" ] || compile
cat "$logs/archs"
if [ "$(cat "$logs/archs.code")" -eq 0 ]; then
    passed=$((passed + 1))
else
    failed=$((failed + 1))
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
