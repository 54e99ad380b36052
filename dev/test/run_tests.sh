#!/bin/sh
# run_tests.sh "command that compiles for other architectures" program...
# Runs the programs, .py files by python3, and then the command, whatever fails. Its last line is "N passed, N failed, N
# skipped". Programs in Python come last. With 16 cores or more they, those that no GPU is for and the compilation run
# beside the others. Of these test_program comes first and alone, because it trains on all GPUs. test_attention, the
# longest, runs beside the rest. Each has TEST_LIMIT · TEST_PATIENCE seconds, and leaves nothing behind.
archs=$1; shift
limit=${TEST_LIMIT:-1200}
cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)  # which would be nproc's answer
beside=$([ "$cores" -lt 16 ] || echo yes)  # some programs run beside the others
# Threads that spin while they wait for each other take cores that other programs need.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
# The reference's small models gain nothing from more threads than that, and those of 64 cores mostly wait for each other.
[ "$cores" -le 16 ] || export OMP_NUM_THREADS="${OMP_NUM_THREADS:-16}"
passed=0 failed=0 skipped=0 alone= first= last=
. "$(dirname "$0")/within.sh"
logs=$groups/logs
mkdir "$logs"

# run program: its output to $logs/<name>, then its exit code to $logs/<name>.code.
run() {
    log=$logs/$(basename "$1")
    case $1 in
    *.py) if command -v python3 >/dev/null; then within "$limit" python3 "$1"; else echo "no python3"; echo "0 passed, 0 failed, 1 skipped"; fi ;;
    *) within "$limit" ./"$1" ;;
    esac >"$log" 2>&1
    echo $? >"$log.code"
}
# report program: shows its output and counts what its last line says; one that dies before it counts as a failure.
report() {
    log=$logs/$(basename "$1") code=$(cat "$logs/$(basename "$1").code")
    echo "== $1"
    cat "$log"
    counts=$(tail -n 1 "$log" | sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped$/\1 \2 \3/p')
    case $code,$counts in
    0,*) ;;
    *,*" 0 "*) counts= ;;  # says that nothing failed, but did not end well
    esac
    if [ -z "$counts" ]; then
        echo "$1 ended with code $code and no result"
        counts="0 1 0"
    fi
    set -- $counts
    passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
}

compile() {
    within "$limit" nice $archs >"$logs/archs" 2>&1
    echo $? >"$logs/archs.code"
}

for program in "$@"; do
    case $program in
    *.py) last="$last $program" ;;
    */test_program) alone=$program ;;
    *) if [ "$beside" ] && [ ! -e "$(dirname "$program")/test/$(basename "$program").cu" ]; then last="$last $program"; else first="$first $program"; fi ;;
    esac
done
if [ "$beside" ]; then
    for program in $last; do (export OMP_NUM_THREADS=2; run "$program") & done  # the first keep most cores
    compile &
fi
for program in $alone; do run "$program"; report "$program"; done
longest=
for program in $first; do
    case $beside,$program in
    yes,*/test_attention) longest=$program; run "$program" & ;;
    *) run "$program"; report "$program" ;;
    esac
done
wait
for program in $longest $last; do
    [ "$beside" ] || run "$program"
    report "$program"
done
echo "== every kernel for each kind of architecture, no warnings, in attention no spills, no serialized wgmma"
[ "$beside" ] || compile
cat "$logs/archs"
if [ "$(cat "$logs/archs.code")" -eq 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
